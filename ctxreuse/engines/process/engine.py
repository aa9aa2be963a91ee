"""ChildEngine: an engine in a process of its own behind the Engine interface."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, block_layout
from ctxreuse.codec import Codec, CodecDevice
from ctxreuse.codec.profile_bytes import write_profile
from ctxreuse.config import EngineConfig
from ctxreuse.cuda import missing, open_device
from ctxreuse.cuda.blocks import DeviceBlocks
from ctxreuse.engines.base import Context, Logits
from ctxreuse.engines.checks import check_export, check_kind
from ctxreuse.engines.exits import ExitStep
from ctxreuse.engines.process.chunks import ChildChunkOps
from ctxreuse.engines.process.connection import Connection, Result
from ctxreuse.engines.process.context import ChildContext
from ctxreuse.engines.process.loading import ChildLoading
from ctxreuse.engines.process.supervisor import EngineState, Supervisor
from ctxreuse.engines.process.text import ChildText
from ctxreuse.engines.process.wire import ContextFacts, Opening, WireError, encode_headers
from ctxreuse.engines.scoring import TokenScores
from ctxreuse.errors import ConfigError, CtxReuseError, EngineDiedError, EngineError
from ctxreuse.exits import ExitPlan, ExitRow, RampCost
from ctxreuse.identity.keys import Tokens, as_tokens

__all__ = ["ChildEngine", "ChildRelocatingEngine", "EngineStart", "open_child_engine"]

T = TypeVar("T")

#: Blocks that one call exports: an engine may read the whole context for each call, between two passes.
_EXPORTED = 8
#: Bytes of a sealed block beyond its planes.
_HEAD = 64 << 10


class ChildEngine:
    """See `ctxreuse.engines.base.Engine`. Its process is started at once, and again when it has died.

    When it dies, all its contexts are lost: every call with one raises EngineDiedError. The
    next call that needs no context waits until it is up again. Use it from any thread; close it.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        """Of a supervisor whose process is up; see `open_child_engine`."""
        opened = supervisor.connection().opened
        self.space, self.batches, self.least_slice = opened.space, opened.batches, opened.least_slice
        self._supervisor = supervisor
        self._codec: Codec | None = None
        #: Encodes blocks on the device that the engine computes on, in this process.
        self.encoder: CodecDevice | None = None
        self._free = -1
        self._ramps: tuple[RampCost, ...] | None = None
        self._has_codec, self._codec_given = opened.codec, False
        self._lock = threading.Lock()
        self._seen: Connection | None = None
        self.text = ChildText(opened.text, self._call) if opened.text is not None else None
        self._layers = [i for i, spec in enumerate(self.space.layers) if spec.blocked]
        self._block_bytes, self._state_bytes = block_layout(self.space).nbytes + _HEAD, 1 << 20
        self._logits_bytes = 4 * self.space.vocab_size + 64
        weakref.finalize(self, supervisor.close)
        if self.text is not None:
            self.text.prepare()

    # The process

    @property
    def state(self) -> EngineState:
        """What its process is doing."""
        return self._supervisor.state

    @property
    def failing(self) -> str:
        """Why calls fail at present: it has died again and again; "": they do not."""
        return self._supervisor.failing

    @property
    def pid(self) -> int:
        """The id of its process; 0 while there is none."""
        return self._supervisor.pid

    @property
    def restarts(self) -> int:
        """How often the process has died."""
        return self._supervisor.restarts

    @property
    def memory(self) -> int:
        """Bytes of its process in memory, 0 where that is not known."""
        return self._supervisor.memory

    def start(self) -> None:
        """Start the process if it does not run, and wait until it is up. Raises as `new_context`."""
        self._connected()

    def unload(self) -> None:
        """End the process until the next call; its contexts are lost."""
        self._supervisor.unload()

    def close(self) -> None:
        """End the process for good. Idempotent."""
        self._supervisor.close()

    def _connected(self) -> Connection:
        connection = self._supervisor.connection()
        if connection is self._seen:
            return connection
        with self._lock:
            if connection.opened.space.digest != self.space.digest:
                raise EngineError(
                    "the engine's process came back with another model or library",
                    where=connection.opened.space.architecture,
                    fix="The files have changed since they were opened: restart this program",
                )
            if self._codec_given:
                self._give_codec(connection)
            self._seen = connection
        return connection

    def _anew(self, make: Callable[[Connection], T]) -> T:
        """Make a call that needs no context; if the process dies meanwhile, once more in the next one."""
        try:
            return make(self._connected())
        except EngineDiedError:
            return make(self._connected())

    def _own(self, context: Context) -> ChildContext:
        return check_kind(context, ChildContext)

    def _call(
        self,
        verb: str,
        *args: Any,
        on: Sequence[ChildContext] = (),
        appended: Sequence[Tokens] = (),
        arrays: Sequence[npt.NDArray[Any]] = (),
        room: int = 0,
        again: bool = True,
    ) -> Result:
        """Call ``verb`` on contexts of one connection; ``appended``: the ids that it appends to each.

        ``again``: a call without contexts is made once more, in the next process, if this one ends meanwhile.
        """
        if not on and not again:
            return self._connected().call(verb, *args, arrays=arrays, room=room)
        if not on:
            return self._anew(lambda connection: connection.call(verb, *args, arrays=arrays, room=room))
        numbers = [one.number for one in on]
        found = on[0].connection.call(verb, *args, contexts=numbers, arrays=arrays, room=room)
        for i, (context, facts) in enumerate(zip(on, found.facts)):
            self._free = facts.free
            context.update(facts, appended[i] if appended else None)
        return found

    # The engine

    def free_memory(self) -> int | None:
        """See `DeviceMemoryEngine.free_memory`; as it was with the last call."""
        return None if self._free < 0 else self._free

    @property
    def codec(self) -> Codec | None:
        """See `Engine.codec`; unless one is set, that of this user's newest calibration profile."""
        if self._codec is None and self._has_codec:
            self._codec = Codec.open(self.space)
            self._codec.device = self.encoder
        return self._codec

    @codec.setter
    def codec(self, codec: Codec) -> None:
        if codec.space.digest != self.space.digest:
            raise ConfigError("the codec is for another model space", where=self.space.architecture)
        with self._lock:
            codec.device = codec.device or self.encoder
            self._codec, self._codec_given = codec, True
            if self._seen is not None and self._seen.died is None:
                self._give_codec(self._seen)

    def _give_codec(self, connection: Connection) -> None:
        assert self._codec is not None
        profile, profiles = self._codec.profile, self._codec.profiles
        raw = write_profile(profile) if profile is not None else b""
        folder = os.fspath(profiles) if profiles is not None else ""
        connection.call("set_codec", self._codec.digest, folder, arrays=[np.frombuffer(raw, np.uint8)])

    def new_context(self, reserve: int = 0) -> ChildContext:
        """See `Engine.new_context`. Waits while the process is started; raises EngineDiedError if it cannot be."""

        def made(connection: Connection) -> ChildContext:
            number = connection.number()
            return ChildContext(connection, number, connection.call("new", number, reserve).facts[0])

        return self._anew(made)

    def load(
        self,
        context: Context,
        views: Sequence[BlockView],
        state: BlockView | None = None,
        ready: Callable[[int], None] | None = None,
    ) -> ChildLoading:
        """See `Engine.load`. Heads of the blocks go first, then their planes, layer by layer."""
        own, views = self._own(context), list(views)
        load = own.connection.number()
        arrays = [encode_headers(views)]
        if state is not None:
            arrays.append(np.frombuffer(state.buffer, np.uint8))
        ids = np.concatenate([view.tokens for view in views]) if views else np.zeros(0, "<i4")
        self._call("load", load, on=[own], appended=[ids], arrays=arrays)
        return ChildLoading(own.connection, load, views, self._layers if views else (), ready)

    def fork(self, context: Context, count: int, reserve: int = 0) -> list[Context]:
        """See `ForkingEngine.fork`."""
        own = self._own(context)
        numbers = [own.connection.number() for _ in range(count)]
        facts = msgspec.convert(self._call("fork", numbers, reserve, on=[own]).value, list[ContextFacts])
        made: list[Context] = []
        for number, one in zip(numbers, facts):
            fork = ChildContext(own.connection, number, one)
            fork.update(one, own.tokens[: one.n])
            made.append(fork)
        return made

    def prefill(self, context: Context, tokens: Tokens) -> Logits:
        """See `Engine.prefill`."""
        own, ids = self._own(context), as_tokens(tokens)
        found = self._call("prefill", on=[own], appended=[ids], arrays=[ids], room=self._logits_bytes)
        logits: Logits = found.arrays[0]
        return logits

    def score(self, context: Context, tokens: Tokens, targets: Tokens, top: int) -> TokenScores:
        """See `ScoringEngine.score`."""
        own, ids = self._own(context), as_tokens(tokens)
        room = len(ids) * (8 + 8 * top) + 256
        found = self._call("score", top, on=[own], appended=[ids], arrays=[ids, as_tokens(targets)], room=room)
        return TokenScores(*found.arrays)

    def step(
        self, batch: Sequence[tuple[Context, Tokens]], *, limit: int | None = None, rows: Sequence[int] = ()
    ) -> list[Logits | CtxReuseError | None]:
        """See `Engine.step`: one round trip. Contexts that are lost get EngineDiedError."""
        found: list[Logits | CtxReuseError | None] = [None] * len(batch)
        wanted = list(rows) or [1] * len(batch)
        running, failed = self._running([(context, tokens) for context, tokens in batch])
        for i, error in failed.items():
            found[i] = error
        if not running:
            return found
        ids = [one for *_, one in running]
        try:
            done = self._call(
                "step",
                [len(one) for one in ids],
                limit,
                [wanted[i] for i, *_ in running],
                on=[own for _, own, _ in running],
                appended=ids,
                arrays=[np.concatenate(ids)],
                room=sum(wanted[i] for i, *_ in running) * self._logits_bytes,
            )
        except EngineDiedError as error:
            for i, *_ in running:
                found[i] = error.again()
            return found
        logits = iter(done.arrays)
        for (i, *_), result in zip(running, done.value):
            if isinstance(result, list):
                found[i] = _error(result)
            elif result:
                found[i] = next(logits)
        return found

    def _running(
        self, batch: Sequence[tuple[Context, Tokens]]
    ) -> tuple[list[tuple[int, ChildContext, Tokens]], dict[int, CtxReuseError]]:
        """Those contexts of a batch that are in the process, by their places in it, and the errors of the others."""
        running: list[tuple[int, ChildContext, Tokens]] = []
        failed: dict[int, CtxReuseError] = {}
        for i, (context, tokens) in enumerate(batch):
            own = self._own(context)
            try:
                if own.connection.died is not None:
                    raise own.connection.died.again()
                running.append((i, own, as_tokens(tokens)))
            except CtxReuseError as error:
                failed[i] = error
        return running, failed

    def use_drafts(self) -> str:
        """See `DraftEngine.use_drafts`."""
        return str(self._call("use_drafts").value)

    @property
    def ramps(self) -> Sequence[RampCost] | str:
        """See `ExitEngine.ramps`; looked up once."""
        if self._ramps is None:
            found = self._call("ramps").value
            if isinstance(found, str):
                return found
            self._ramps = msgspec.convert(found, tuple[RampCost, ...])
        return self._ramps

    def exit_step(self, batch: Sequence[tuple[Context, Tokens, ExitPlan]]) -> list[ExitStep | CtxReuseError]:
        """See `ExitEngine.exit_step`: one round trip."""
        running, failed = self._running([(context, tokens) for context, tokens, _ in batch])
        found: dict[int, ExitStep | CtxReuseError] = dict(failed)
        if running:
            ids = [one for *_, one in running]
            try:
                done = self._call(
                    "exit_step",
                    [len(one) for one in ids],
                    [batch[i][2] for i, *_ in running],
                    on=[own for _, own, _ in running],
                    appended=ids,
                    arrays=[np.concatenate(ids)],
                    room=len(running) * self._logits_bytes,
                )
            except EngineDiedError as error:
                return [found.get(i) or error.again() for i in range(len(batch))]
            logits = iter(done.arrays)
            for (i, *_), (step, raw) in zip(running, done.value):
                if step is None:
                    found[i] = _error(raw)
                else:
                    token, left, rows, spent = msgspec.convert(step, tuple[int, int, tuple[ExitRow, ...], float])
                    found[i] = ExitStep(next(logits) if left < 0 else None, token, left, rows, spent)
        return [found[i] for i in range(len(batch))]

    def complete_rows(self, context: Context) -> tuple[ExitRow, ...]:
        """See `ExitEngine.complete_rows`."""
        return msgspec.convert(self._call("complete_rows", on=[self._own(context)]).value, tuple[ExitRow, ...])

    def export(
        self, context: Context, keys: Sequence[bytes], parent: bytes, first: int, *, last_partial: bool = False
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """See `Engine.export`. The first blocks are made at once, the others as they are wanted."""
        own = self._own(context)
        check_export(first, len(keys), self.space.block_tokens, own.n, last_partial=last_partial)
        begun = self._export(own, list(keys), parent, first, last_partial)
        head = next(begun, None)
        return iter(()) if head is None else _chained(head, begun)

    def _export(
        self, context: ChildContext, keys: Sequence[bytes], parent: bytes, first: int, last_partial: bool
    ) -> Iterator[npt.NDArray[np.uint8]]:
        for at in range(0, len(keys), _EXPORTED):
            some, room = keys[at : at + _EXPORTED], min(_EXPORTED, len(keys) - at) * self._block_bytes
            last = last_partial and at + len(some) == len(keys)
            yield from self._call("export", some, parent, first + at, last, on=[context], room=room).arrays
            parent = some[-1]

    def export_state(self, context: Context, key: bytes, parent: bytes, position: int) -> npt.NDArray[np.uint8]:
        """See `Engine.export_state`."""
        own = self._own(context)
        data: npt.NDArray[np.uint8] = self._call(
            "export_state", key, parent, position, on=[own], room=self._state_bytes
        ).arrays[0]
        self._state_bytes = max(self._state_bytes, data.nbytes + 64)
        return data

    def crop(self, context: Context, n: int) -> bool:
        """See `Engine.crop`."""
        own = self._own(context)
        if n == own.n and not own.lost:
            return True
        return bool(self._call("crop", n, on=[own]).value)

    def first_rows(self, tokens: Tokens, positions: Tokens) -> tuple[int, npt.NDArray[np.float32]] | None:
        """See `Engine.first_rows`."""
        found = self._call("first_rows", arrays=[as_tokens(tokens), as_tokens(positions)])
        return None if found.value is None else (found.value, found.arrays[0])

    def row_errors(
        self, context: Context, rows: Tokens
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """See `Engine.row_errors`."""
        found = self._call("row_errors", on=[self._own(context)], arrays=[as_tokens(rows)])
        return None if found.value is None else (found.arrays[0], found.arrays[1])


def _error(raw: Any) -> CtxReuseError:
    """The error of one context in a pass; raises another kind."""
    error = msgspec.convert(raw, WireError).error()
    if not isinstance(error, CtxReuseError):
        raise error
    return error


class ChildRelocatingEngine(ChildEngine):
    """A `ChildEngine` whose process reuses chunks: a `ctxreuse.engines.chunks.ChunkEngine`."""

    @property
    def chunks(self) -> ChildChunkOps:
        """See `ChunkEngine.chunks`."""
        return ChildChunkOps(self.space, self._own, self._call)


def _chained(head: npt.NDArray[np.uint8], rest: Iterator[npt.NDArray[np.uint8]]) -> Iterator[npt.NDArray[np.uint8]]:
    yield head
    yield from rest


def open_child_engine(config: EngineConfig, **options: Any) -> ChildEngine:
    """Open the engine of a config in a process of its own; ``options``: further ones of `open_engine`.

    Raises what `open_engine` raises there.
    """
    return EngineStart.of(config, **options).opened()


class EngineStart:
    """An engine's process that starts while its caller goes on. Call `opened` or `close`.

    Args:
        opener, options: see `ctxreuse.engines.process.wire.Opening`.
    """

    def __init__(self, opener: str, options: dict[str, Any]) -> None:
        self._supervisor = Supervisor(Opening(opener, options))
        self._supervisor.start()
        self._device = str(options.get("config", {}).get("device", "cpu"))

    @classmethod
    def of(cls, config: EngineConfig, **options: Any) -> EngineStart:
        """Start the engine of a config; ``options``: further ones of `open_engine`."""
        return cls("ctxreuse.engines.process.server:open_config", {"config": msgspec.to_builtins(config), **options})

    def opened(self) -> ChildEngine:
        """Wait until the process is up, and return its engine. Raises what opening it raises there."""
        try:
            relocates = self._supervisor.connection().opened.chunks
            engine = (ChildRelocatingEngine if relocates else ChildEngine)(self._supervisor)
            if self._device.startswith("cuda") and not missing():
                engine.encoder = DeviceBlocks(open_device())
            return engine
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process; not after `opened` has returned an engine. Idempotent."""
        self._supervisor.close()
