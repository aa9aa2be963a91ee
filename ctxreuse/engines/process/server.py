"""The child's side: an engine behind a pipe, its calls run by the main thread, which computes, and a few others."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import msgspec
import numpy as np

from ctxreuse.block.format import BlockView, Header, layout_of_header, parse
from ctxreuse.codec import Codec, ProfileStore
from ctxreuse.codec.profile_bytes import read_profile
from ctxreuse.config import EngineConfig
from ctxreuse.constrain import HasVocabulary
from ctxreuse.engines.base import Context, DraftEngine, Engine, Loading, SlicingEngine
from ctxreuse.engines.chunks import ChunkEngine, ChunkOps, CompressingOps, Relocation
from ctxreuse.engines.exits import ExitEngine
from ctxreuse.engines.fork import fork_context
from ctxreuse.engines.pieces import pieces_of
from ctxreuse.engines.process.loading import placed_planes
from ctxreuse.engines.process.memory import SharedMemory
from ctxreuse.engines.process.pipe import FramePipe, Payload
from ctxreuse.engines.process.wire import (
    Array,
    Call,
    ContextFacts,
    EngineMessage,
    EngineOpened,
    LayerArrived,
    LayerUsed,
    OpenFailed,
    Opening,
    Released,
    Returned,
    TextFacts,
    WireError,
    decode_headers,
    pack_arrays,
    unpack_arrays,
)
from ctxreuse.engines.scoring import score_tokens
from ctxreuse.engines.text import Message
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.exits import ExitPlan
from ctxreuse.kernels.dispatch import native

__all__ = ["open_config", "serve"]

log = logging.getLogger(__name__)

#: Bytes of freed memory that the process keeps, as each pass needs about what the last one had; a pass of 512 tokens in
#: float32 took 1.2 times as long with 70,000 new pages each.
_KEPT = 256 << 20
# Threads for what does not compute: waits for loads, exports, texts.
_THREADS = 8
#: Verbs of the thread that computes, which is the one that opened the engine: libraries keep a team of workers for each
#: thread that computes, and with more workers than cores OpenMP's sleep after each piece. On two cores passes of 128
#: tokens of SmolLM2 took torch 1.5 to 1.8 times as long in another thread.
_COMPUTES = frozenset((
    "fork", "prefill", "score", "step", "first_rows", "row_errors", "insert_rows", "deviations", "attention",
    "recompute_rows", "ramps", "exit_step", "complete_rows", "use_drafts",
))  # fmt: skip

#: The result of a verb: a value, and arrays.
Outcome = tuple[Any, Sequence[Array]]


class _ArrivingView(BlockView):
    """A block whose planes come layer by layer, to places in the shared memory."""

    __slots__ = ("_places",)

    def __init__(self, header: Header) -> None:
        super().__init__(header, layout_of_header(header), 0, memoryview(b""))
        self._places: dict[tuple[int, str], int] = {}

    def place(self, layer: int, role: str, at: int) -> None:
        """A plane lies at ``at``."""
        self._places[layer, role] = at

    def offset(self, layer: int, role: str) -> int:
        """See `BlockView.offset`; KeyError before the plane has arrived."""
        return self._places[layer, role]


class _Arriving:
    """The layers of one load, as they come."""

    def __init__(self, pipe: FramePipe[EngineMessage], memory: SharedMemory, load: int) -> None:
        self._pipe, self._memory, self._load = pipe, memory, load
        self._change = threading.Condition()
        self._here: dict[int, LayerArrived] = {}
        self._slots: dict[int, int] = {}
        self.views: list[_ArrivingView] = []
        self.layers: frozenset[int] = frozenset()
        self.loading: Loading | None = None

    def arrived(self, message: LayerArrived) -> None:
        """A layer has come, or will not."""
        with self._change:
            self._here[message.layer] = message
            self._change.notify_all()

    def ready(self, layer: int) -> None:
        """For the engine: return when a layer's planes are in; its thread has copied those it asked for before."""
        me = threading.get_ident()
        if (at := self._slots.pop(me, None)) is not None:
            self._pipe.send(LayerUsed(self._load, at))
        if layer not in self.layers:
            return
        with self._change:
            while (found := self._here.get(layer)) is None:
                self._change.wait()
        if found.failed is not None:
            raise found.failed.error()
        placed = list(placed_planes(self.views, layer))
        end = max((end for *_, end in placed), default=0)
        memory = memoryview(self._memory.map(found.at + end)).toreadonly()
        for number, plane, start, _ in placed:
            view = self.views[number]
            view.buffer = memory
            view.place(plane.layer, plane.role, found.at + start)
        self._slots[me] = found.at


class _Server:
    """Serves one engine; each verb is a method of its name."""

    def __init__(self, engine: Engine, pipe: FramePipe[EngineMessage], memory: SharedMemory) -> None:
        self._engine, self._pipe, self._memory = engine, pipe, memory
        self._contexts: dict[int, Context] = {}
        self._loads: dict[int, _Arriving] = {}
        self._loads_of: dict[int, list[int]] = {}
        self._computing: queue.SimpleQueue[tuple[Call, Payload]] = queue.SimpleQueue()
        self._others = ThreadPoolExecutor(_THREADS, "engine-call")

    def run(self) -> NoReturn:
        """Compute on this thread, which must be the one that opened the engine; the process ends with its parent."""
        threading.Thread(target=self._receive_all, name="engine-receive", daemon=True).start()
        while True:
            self._answer(*self._computing.get())

    def _receive_all(self) -> None:
        status = 1
        try:
            with contextlib.suppress(OSError):
                self._receive()
            status = 0
        except BaseException:
            traceback.print_exc()  # its last words
        finally:
            os._exit(status)  # whatever is being computed

    def _receive(self) -> None:
        while (received := self._pipe.receive()) is not None:
            message, payload = received
            if isinstance(message, Call) and message.verb in _COMPUTES:
                self._computing.put((message, payload))
            elif isinstance(message, Call):
                self._others.submit(self._answer, message, payload)
            elif isinstance(message, LayerArrived):
                if (load := self._loads.get(message.load)) is not None:
                    load.arrived(message)
            elif isinstance(message, Released):
                self._contexts.pop(message.context, None)
                for number in self._loads_of.pop(message.context, ()):
                    self._loads.pop(number, None)

    def _answer(self, call: Call, payload: Payload) -> None:
        try:
            contexts = [self._contexts[number] for number in call.contexts]
            verb = getattr(self, f"do_{call.verb}")
            value, arrays = verb(*contexts, *call.args, *unpack_arrays(call.arrays, payload, self._memory), call=call)
            facts = tuple(_facts(one, self._engine) for one in contexts or self._made(call))
            specs, body = pack_arrays(arrays, self._memory, call.room)
            returned = Returned(call.number, value, specs, facts)
        except Exception as error:
            returned, body = Returned(call.number, error=WireError.of(error)), b""
        with contextlib.suppress(OSError):  # the parent is gone: the receiving thread ends this process
            self._pipe.send(returned, body)

    def _made(self, call: Call) -> list[Context]:
        return [self._contexts[call.args[0]]] if call.verb == "new" else []

    # Contexts

    def do_new(self, number: int, reserve: int, *, call: Call) -> Outcome:
        self._contexts[number] = self._engine.new_context(reserve)
        return None, ()

    def do_fork(self, context: Context, numbers: Sequence[int], reserve: int, *, call: Call) -> Outcome:
        # Nobody finds these blocks by their keys.
        keys = [number.to_bytes(32, "little") for number in range(context.n // self._engine.space.block_tokens)]
        found = fork_context(self._engine, context, keys, len(numbers), reserve)
        self._contexts.update(zip(numbers, found))
        return [_facts(one, self._engine) for one in found], ()

    def do_prefill(self, context: Context, ids: Array, *, call: Call) -> Outcome:
        return None, [self._engine.prefill(context, ids)]

    def do_score(self, context: Context, top: int, ids: Array, targets: Array, *, call: Call) -> Outcome:
        return None, list(score_tokens(self._engine, context, ids, targets, top))

    def do_step(self, *given: Any, call: Call) -> Outcome:
        contexts, (counts, limit, rows, ids) = given[:-4], given[-4:]
        parts = np.split(ids, np.cumsum(counts)[:-1])
        found = self._engine.step(list(zip(contexts, parts)), limit=limit, rows=rows)
        value: list[Any] = [WireError.of(one) if isinstance(one, Exception) else int(one is not None) for one in found]
        return value, [one for one in found if isinstance(one, np.ndarray)]

    def do_ramps(self, *, call: Call) -> Outcome:
        engine = self._engine
        return engine.ramps if isinstance(engine, ExitEngine) else "this engine has no early exits", ()

    def do_exit_step(self, *given: Any, call: Call) -> Outcome:
        assert isinstance(self._engine, ExitEngine)
        contexts, (counts, plans, ids) = given[:-3], given[-3:]
        parts = np.split(ids, np.cumsum(counts)[:-1])
        found = self._engine.exit_step(list(zip(contexts, parts, msgspec.convert(plans, list[ExitPlan]))))
        value: list[Any] = [
            (None, WireError.of(one))
            if isinstance(one, Exception)
            else ((one.token, one.left, one.rows, one.spent), None)
            for one in found
        ]
        return value, [one.logits for one in found if not isinstance(one, Exception) and one.logits is not None]

    def do_complete_rows(self, context: Context, *, call: Call) -> Outcome:
        assert isinstance(self._engine, ExitEngine)
        return self._engine.complete_rows(context), ()

    def do_use_drafts(self, *, call: Call) -> Outcome:
        return self._engine.use_drafts() if isinstance(self._engine, DraftEngine) else "", ()

    def do_crop(self, context: Context, n: int, *, call: Call) -> Outcome:
        return self._engine.crop(context, n), ()

    def do_export(
        self, context: Context, keys: list[bytes], parent: bytes, first: int, last_partial: bool, *, call: Call
    ) -> Outcome:
        return None, list(self._engine.export(context, keys, parent, first, last_partial=last_partial))

    def do_export_state(self, context: Context, key: bytes, parent: bytes, position: int, *, call: Call) -> Outcome:
        return None, [self._engine.export_state(context, key, parent, position)]

    def do_first_rows(self, tokens: Array, positions: Array, *, call: Call) -> Outcome:
        found = self._engine.first_rows(tokens, positions)
        return (None, ()) if found is None else (found[0], [found[1]])

    def do_row_errors(self, context: Context, rows: Array, *, call: Call) -> Outcome:
        found = self._engine.row_errors(context, rows)
        return (None, ()) if found is None else (True, found)

    # Loads

    def do_load(self, context: Context, load: int, headers: Array, *state: Array, call: Call) -> Outcome:
        arriving = _Arriving(self._pipe, self._memory, load)
        arriving.views = [_ArrivingView(header) for header in decode_headers(headers)]
        arriving.layers = frozenset(i for i, spec in enumerate(self._engine.space.layers) if spec.blocked)
        self._loads[load] = arriving
        try:
            given = parse(state[0].copy()) if state else None
            arriving.loading = self._engine.load(context, arriving.views, given, arriving.ready)
        except BaseException:
            del self._loads[load]
            raise
        self._loads_of.setdefault(call.contexts[0], []).append(load)
        return None, ()

    def do_wait(self, load: int, *, call: Call) -> Outcome:
        arriving = self._loads.get(load)
        if arriving is not None:
            assert arriving.loading is not None
            try:
                arriving.loading.wait()
            finally:
                self._loads.pop(load, None)
        return None, ()

    def do_set_codec(self, digest: str, folder: str, profile: Array, *, call: Call) -> Outcome:
        space, profiles = self._engine.space, ProfileStore(folder) if folder else None
        given = (digest, read_profile(profile.tobytes())) if len(profile) else None
        self._engine.codec = Codec(space, given, profiles=profiles)  # type: ignore[misc]
        return None, ()

    # Chunks

    @property
    def _ops(self) -> ChunkOps:
        assert isinstance(self._engine, ChunkEngine)
        return self._engine.chunks

    def do_insert_rows(
        self,
        context: Context,
        spans: Sequence[Sequence[int]],
        starts: Sequence[int],
        level: str,
        rotate: bool,
        ids: Array,
        headers: Array,
        *blocks: Array,
        call: Call,
    ) -> Outcome:
        heads = zip(decode_headers(headers), starts, blocks)
        views = [BlockView(head, layout_of_header(head), start, block.data) for head, start, block in heads]
        rows = [Relocation(start, views[number], row, count) for start, number, row, count in spans]
        self._ops.insert_rows(context, ids, rows, level, rotate=rotate)
        return None, ()

    def do_compress(self, context: Context, format: Any, level: str, *, call: Call) -> Outcome:
        ops = self._ops
        if not isinstance(ops, CompressingOps):
            raise EngineError("this engine keeps no contexts compressed")
        ops.compress(context, format, level)
        return None, ()

    def do_deviations(self, context: Context, layer: int, role: Any, rows: Array, *, call: Call) -> Outcome:
        return None, self._ops.deviations(context, rows, layer, role)

    def do_attention(
        self, context: Context, queries: int, layers: int, rows: Array, ids: Array, *, call: Call
    ) -> Outcome:
        return None, [self._ops.attention(context, rows, ids, queries=queries, layers=layers)]

    def do_recompute_rows(
        self, context: Context, drift: Sequence[Sequence[int]], rows: Array, ids: Array, *, call: Call
    ) -> Outcome:
        spans = [(start, end) for start, end in drift]
        return None, [self._ops.recompute_rows(context, rows, ids, drift=spans)]

    # Text

    def do_vocabulary(self, *, call: Call) -> Outcome:
        text: object = self._engine.text
        if not isinstance(text, HasVocabulary):
            raise ConfigError("this engine does not tell its vocabulary, so no answer can be constrained")
        tokens, special = text.vocabulary()
        ends = np.cumsum([len(token) for token in tokens], dtype="<i8")
        return None, [np.frombuffer(b"".join(tokens), np.uint8), ends, np.asarray(special, "<i8")]

    def do_pieces(self, *, call: Call) -> Outcome:
        assert self._engine.text is not None
        found = pieces_of(self._engine.text)
        return None, [] if found is None else [np.frombuffer(found.text, np.uint8), found.ends]

    def do_encode(self, markers: bool, text: Array, *, call: Call) -> Outcome:
        assert self._engine.text is not None
        return None, [self._engine.text.encode(text.tobytes().decode(), markers=markers)]

    def do_decode(self, ids: Array, *, call: Call) -> Outcome:
        assert self._engine.text is not None
        return None, [_bytes_of(self._engine.text.decode(ids))]

    def do_render(self, generate: bool, raw: Array, *, call: Call) -> Outcome:
        assert self._engine.text is not None
        messages, tools = msgspec.msgpack.decode(raw.tobytes(), type=tuple[list[Message], list[str]])
        given = {"tools": tools} if tools else {}  # a user's own text model may know none
        return None, [_bytes_of(self._engine.text.render(messages, generate=generate, **given))]


def _bytes_of(text: str) -> Array:
    return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)


def _facts(context: Context, engine: Engine) -> ContextFacts:
    # As `RelocatedContext` and `DeviceMemoryEngine` say. To ask isinstance() of them takes 70 us a context and pass.
    free = engine.free_memory() if hasattr(engine, "free_memory") else None
    spans = getattr(context, "relocated", ()), getattr(context, "gaps", ())
    return ContextFacts(context.n, context.nbytes, context.states, context.levels, *spans, -1 if free is None else free)


def _opened(opening: Opening) -> Engine:
    module, _, name = opening.opener.partition(":")
    opener: Callable[..., Engine] = getattr(importlib.import_module(module), name)
    options: Mapping[str, Any] = opening.options
    return opener(**options)


def open_config(config: dict[str, Any], **options: Any) -> Engine:
    """Open the engine of a config, given as plain values."""
    from ctxreuse.engines.registry import open_engine

    return open_engine(msgspec.convert(config, EngineConfig), **options)


def serve(pipe: FramePipe[EngineMessage]) -> None:
    """Open the engine that the parent names, serve it, and end this process when the parent is gone."""
    received = pipe.receive()
    if received is None or not isinstance(received[0], Opening):
        os._exit(0)
    opening = received[0]
    memory = SharedMemory(opening.memory)
    native.keep_freed(_KEPT)
    # The parent may go while the engine is opened, which takes seconds.
    try:
        engine = _opened(opening)
    except Exception as error:
        pipe.send(_failed(error))
        os._exit(3)
    text = engine.text
    facts = None
    if text is not None:
        facts = TextFacts(text.stop_ids, text.markers, text.token_chars, getattr(text, "template", ""))
    chunks, codec = isinstance(engine, ChunkEngine), engine.codec is not None
    server = _Server(engine, pipe, memory)
    least = engine.least_slice if isinstance(engine, SlicingEngine) else 1
    pipe.send(EngineOpened(engine.space, engine.batches, chunks, codec, facts, least))
    server.run()


def _failed(error: Exception) -> OpenFailed:
    described = WireError.of(error)
    return OpenFailed(described if described.kind else WireError.of(EngineError(f"it cannot be opened: {error!r}")))
