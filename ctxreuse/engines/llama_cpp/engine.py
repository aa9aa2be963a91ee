"""LlamaEngine: a GGUF on llama.cpp's library behind the Engine interface."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse import kernels
from ctxreuse.block.format import BlockView, BlockWriter, block_layout
from ctxreuse.block.levels import is_raw
from ctxreuse.codec import Codec
from ctxreuse.config import EngineConfig
from ctxreuse.engines.base import Context, Logits, check_length, check_prompt
from ctxreuse.engines.checks import (
    check_blocks,
    check_boundary,
    check_crop,
    check_export,
    check_kind,
    check_state,
    decoded_state,
)
from ctxreuse.engines.export import export_blocks
from ctxreuse.engines.imports import Import
from ctxreuse.engines.kept import machine_bytes
from ctxreuse.engines.llama_cpp.cell_rows import CellRows, Rows
from ctxreuse.engines.llama_cpp.cells import LlamaCells, SlotRun
from ctxreuse.engines.llama_cpp.context import LlamaContext
from ctxreuse.engines.llama_cpp.library import LlamaLibrary, LlamaModel
from ctxreuse.engines.llama_cpp.pool import LlamaPool
from ctxreuse.engines.llama_cpp.state import LlamaState, StateLayout
from ctxreuse.engines.llama_cpp.text import open_text
from ctxreuse.engines.llama_cpp.windows import fits, read_windows, seal_windows
from ctxreuse.engines.scoring import TokenScores, score_logits
from ctxreuse.engines.stepping import first_slice
from ctxreuse.engines.user_codec import UserCodec
from ctxreuse.errors import ConfigError, CtxReuseError, EngineError, FormatError
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import LayerKind, LayerSpec, ModelSpace
from ctxreuse.models import file_digest
from ctxreuse.models.gguf_head import check_head

__all__ = ["LlamaEngine"]

#: Below this a copy takes less than 1 ms, and starting a thread for it a good part of that.
_THREAD_BYTES = 4 << 20
#: The library computes fewer than 64 tokens of a context in another way, and each takes half as much again. Tokens of
#: others are no gain: it computes them together only as far as all have some.
_SLICE = 128
#: Tokens of the self-test, and how many of them are loaded.
_TOKENS, _LOADED = 8, 5


class LlamaEngine(UserCodec):
    """See `ctxreuse.engines.base.Engine`. Use different contexts from different threads at will.

    Contexts that compute share a llama.cpp context, each in cells of its own (see `LlamaPool`). Blocks are the
    library's own rows: K rotated, both in the type of its cache. Opening it learns how the library writes them and
    loads some back; a build or model where the result is not the same to the bit is refused.

    Attributes:
        model: the GGUF in the library's memory.
    """

    def __init__(self, config: EngineConfig, *, reserve: int = 0, block_tokens: int = 64) -> None:
        """Open the GGUF ``config.model``.

        Raises ConfigError (no such file, no library), FormatError (no GGUF), EngineError (a model or build that the
        engine cannot keep contexts of).
        """
        file = Path(config.model).expanduser().absolute()
        if not file.is_file():
            raise ConfigError("no such file", where=str(file), fix="Name a GGUF file")
        check_head(file, distinct="tokenizer.ggml.tokens")  # llama.cpp asserts that they are
        self._batch = config.chunk + config.chunk // 2  # the longest of `chunk_spans`
        self._chunk, self._threads = config.chunk, config.threads or _threads()
        self.model = LlamaModel(LlamaLibrary.open(config.library), file)
        self._state, rows = self._learn()
        self.space = self._measure(block_tokens)
        self._layout = block_layout(self.space)
        most = (config.kv_bytes or machine_bytes() // 4) // self.space.token_nbytes
        self._pool = LlamaPool(self.model, self._state, rows, most, self._batch, self._threads)
        self.text = open_text(self.model)
        check_length(self.space, reserve)

    def _learn(self) -> tuple[StateLayout, CellRows | None]:
        """How the library writes states, proved by a round trip with the same bits; raises EngineError otherwise.

        And how the same rows are read where they lie, unless that gives others or cannot be done.
        """
        where = str(self.model.library.path)
        fix = "Models with recurrent layers need engine = torch; for others, try ctxreuse[llamacpp]"
        one, two = (LlamaCells(self.model, 1, streams, _TOKENS, self._threads) for streams in (1, 2))
        ids = (np.arange(1, _TOKENS + 1) % self.model.vocab_size).astype(np.int32)
        one.decode([SlotRun(0, 0, ids[:_LOADED])])
        try:
            written = one.state(0)
            layout = StateLayout.learn(written, _LOADED, self.model.number("n_swa"))
            state = LlamaState(layout, _LOADED, written).copy(_LOADED, slot=1, streams=2)
            two.restore(1, state.data)
            if not np.array_equal(two.state(1), state.data):
                raise FormatError("a state that was loaded back is written in another way")
        except FormatError as error:
            raise EngineError(
                f"contexts of {self.model.file.name} cannot be kept: {error}", where=where, fix=fix
            ) from None
        expected = one.decode([SlotRun(0, _LOADED, ids[_LOADED:])])
        if not np.array_equal(two.decode([SlotRun(1, _LOADED, ids[_LOADED:])]), expected):
            raise EngineError("a context that was loaded back continues with other numbers", where=where, fix=fix)
        rows = CellRows.learn(layout, one, LlamaState(layout, _TOKENS, one.state(0)))
        if rows is not None and not layout.window:  # after a crop as well
            two.crop(1, _LOADED)
            two.decode([SlotRun(1, _LOADED, ids[: _TOKENS - _LOADED])])
        if rows is not None and not rows.match(two, 1, LlamaState(layout, _TOKENS, two.state(1), slot=1, streams=2)):
            rows = None
        return layout, rows

    def _measure(self, block_tokens: int) -> ModelSpace:
        model, width = self.model, np.dtype(self._state.bits).itemsize
        key = int(model.setting("{arch}.attention.key_length") or model.number("n_embd") // model.number("n_head"))
        layers = []
        for cache, window in zip(self._state.caches, (0, self._state.window)):
            for k, v in zip(cache.k, cache.v):
                heads = k // width // key if k % (width * key) == 0 and v % (k // key) == 0 else 1
                kind: LayerKind = "sliding" if window else "full"
                layers.append(LayerSpec(kind, heads, k // width // heads, v // width // heads, window))
        digest = file_digest(model.file)
        rope = {name: model.setting("{arch}.rope." + name) for name in ("freq_base", "scaling.type", "scaling.factor")}
        return ModelSpace(
            weights=digest,
            architecture=f"gguf/{model.setting('general.architecture')}",
            tokenizer=digest,
            dtype=self._state.dtype,
            layers=tuple(layers),
            rope=json.dumps(rope, sort_keys=True),
            vocab_size=model.vocab_size,
            max_tokens=model.number("n_ctx_train"),
            block_tokens=block_tokens,
            attention=f"llama.cpp-{model.library.version}",
        )

    def new_context(self, reserve: int = 0) -> LlamaContext:
        """See `Engine.new_context`."""
        check_length(self.space, reserve)
        return LlamaContext(self._pool.nbytes, reserve)

    def prefill(self, context: Context, tokens: Tokens) -> Logits:
        """See `Engine.prefill`."""
        own = self._own(context)
        start = own.n
        while True:
            part = self._next(own, tokens[own.n - start :], None)
            (logits,) = self._compute([part])
            if not part.left:
                return logits

    def score(self, context: Context, tokens: Tokens, targets: Tokens, top: int) -> TokenScores:
        """See `ScoringEngine.score`."""
        own, found = self._own(context), list[TokenScores]()
        ids = check_prompt(self.space, own.n, tokens)
        self._pool.check_room(own.n + len(ids))
        own.finish_load()
        own.run_start, own.cropped = None, False
        for start in range(0, len(ids), self._chunk):
            part = ids[start : start + self._chunk]
            (rows,) = self._pool.compute([(own, part, len(part))])
            each = enumerate(rows.reshape(len(part), -1), start)
            found += [score_logits(row, int(targets[i]), top) for i, row in each]
        return TokenScores.joined(found)

    def _next(self, own: LlamaContext, tokens: Tokens, limit: int | None, rows: int = 1) -> _Part:
        """What of ``tokens`` goes through the model next."""
        ids = check_prompt(self.space, own.n, tokens)
        self._pool.check_room(own.n + len(ids))
        own.finish_load()
        # With several threads a single query is summed otherwise than several. A prompt that is here up to its last
        # token gets the bits of a full prefill if the token before goes along.
        if own.cropped and len(ids) == 1 and own.n % self.space.block_tokens and not self.space.needs_state:
            ids = np.concatenate([own.tokens[-1:], ids])
            self._pool.crop(own, own.n - 1)
        own.cropped = False
        start, end = own.n, own.n + len(ids)
        # llama.cpp's attention rounds otherwise from 64 queries on. Cut at blocks, whole ones are computed in passes of
        # at least so many and the rest in one of fewer, wherever a context begins: resumed, it has the same bits.
        taken = first_slice(self.space, start, len(ids), limit, self._chunk) if rows == 1 else len(ids)
        own.run_start = start if own.run_start is None else own.run_start
        boundary = end - end % self.space.block_tokens if self.space.needs_state else 0
        return _Part(own, ids[:taken], len(ids) - taken, boundary, end - own.run_start, rows)

    def _compute(self, parts: Sequence[_Part]) -> list[Logits]:
        """Append tokens to as many of the contexts as fit into one pass; raises what `LlamaPool.compute` raises."""
        try:
            runs = [(part.context, part.ids, part.rows) for part in parts]
            found = self._pool.compute(runs, [part.left for part in parts])
        except BaseException:
            for part in parts:
                part.context.run_start = None
            raise
        for part in parts[: len(found)]:
            own = part.context
            own.draft_start = own.n - len(part.ids) if part.rows > 1 else None
            if own.n == part.boundary:
                windows, level = self._pool.read_windows(own), own.provenance.level_at(own.n)
                own.keep_snapshot(windows, level, passing=part.whole < self.space.block_tokens)
            if not part.left:
                own.run_start = None
        return found

    @property
    def batches(self) -> bool:
        """See `Engine.batches`."""
        return True

    @property
    def least_slice(self) -> int:
        """See `SlicingEngine.least_slice`."""
        return _SLICE

    def step(
        self, batch: Sequence[tuple[Context, Tokens]], *, limit: int | None = None, rows: Sequence[int] = ()
    ) -> list[Logits | CtxReuseError | None]:
        """See `Engine.step`.

        Rounding: the library computes a row with other kernels when there are more of them, and with several threads it
        sums attention over other parts of the context. Where others are in the cells, but not in the pass, all bits
        are the same.
        """
        found: list[Logits | CtxReuseError | None] = [None] * len(batch)
        parts = dict[int, _Part]()
        for i, (context, tokens) in enumerate(batch):
            try:
                parts[i] = self._next(self._own(context), tokens, limit, rows[i] if rows else 1)
            except CtxReuseError as error:
                found[i] = error
        while parts:
            now = list(parts)
            try:
                done = self._compute(list(parts.values()))
            except EngineError as error:
                if len(now) == 1:
                    return [error if i == now[0] else one for i, one in enumerate(found)]
                for i in now:  # each finds its own
                    (found[i],) = self.step([batch[i]], limit=limit, rows=rows[i : i + 1])
                break
            for i, logits in zip(now, done):
                found[i] = None if parts.pop(i).left else logits
        return found

    def load(
        self,
        context: Context,
        views: Sequence[BlockView],
        state: BlockView | None = None,
        ready: Callable[[int], None] | None = None,
    ) -> Import:
        """See `Engine.load`. Rows are gathered layer by layer; the library takes them all at the next use."""
        own, size = self._own(context), self.space.block_tokens
        own.finish_load()
        check_boundary(own.n, size)
        if not views:
            if state is not None:
                raise EngineError("a state without blocks")
            return Import((), background=False)
        views, start = list(views), own.n
        end = start + sum(len(view.header.tokens) // 4 for view in views)
        check_length(self.space, end)
        coded = any(not is_raw(view.header.level) for view in (*views, *((state,) if state is not None else ())))
        codec = self.codec if coded else None
        check_blocks(views, self.space, self._layout, start, codec)
        state = decoded_state(state, self.space, codec)
        check_state(state, self.space, end, lambda view: fits(view, self.space))
        windows = read_windows(state, self._state.windows) if state is not None else None
        self._pool.expect(own, end)
        rows = self._pool.read(own).copy(end) if start else LlamaState(self._state, end)
        if windows is not None:
            assert state is not None
            rows.fill_windows(windows)
            own.keep_snapshot(windows, state.header.level)
            own.provenance.mark_approximate(end, self._state.window - 1, state.header.level)
        self._pool.put(own, rows)
        own.provenance.load(start, [(len(view.tokens), view.header.level) for view in views])
        own.set_tokens(np.concatenate([own.tokens, *(view.tokens for view in views)]))
        jobs = [
            (layer, partial(self._fill_layer, rows, start, views, layer, ready, codec))
            for layer, spec in enumerate(self.space.layers)
            if spec.blocked
        ]
        own.loading = Import(jobs, background=sum(view.layout.nbytes for view in views) >= _THREAD_BYTES)
        return own.loading

    def _fill_layer(
        self,
        state: LlamaState,
        start: int,
        views: Sequence[BlockView],
        layer: int,
        ready: Callable[[int], None] | None,
        codec: Codec | None,
    ) -> None:
        """Check and copy or decode K and V of one layer to the rows from ``start``, once ``ready`` returns."""
        if ready is not None:
            ready(layer)
        spec, dtype = self.space.layers[layer], self.space.dtype
        for role, dim in (("k", spec.k_dim), ("v", spec.v_dim)):
            row = start
            for raw, run in groupby(views, key=lambda view: is_raw(view.header.level)):
                alike, heads = list(run), spec.kv_heads
                counts = [len(view.header.tokens) // 4 for view in alike]
                if raw:
                    place, width = state.places[layer, role]
                    bad = kernels.scatter_checked(
                        state.data, dtype, place + row * width, (dim, heads * dim),
                        [view.buffer for view in alike], [view.offset(layer, role) for view in alike], dtype,
                        heads, dim, counts, [view.checksum(layer, role) for view in alike],
                    )  # fmt: skip
                    if bad >= 0:
                        alike[bad].plane(layer, role)  # raises, naming the plane
                else:
                    assert codec is not None
                    decoded = np.empty((heads, sum(counts), dim), self._state.bits)
                    codec.fill(alike, layer, role, decoded, 0)
                    target = state.rows(layer, role)[row : row + decoded.shape[1]]
                    target.reshape(-1, heads, dim)[:] = decoded.transpose(1, 0, 2)
                row += sum(counts)

    def export(
        self, context: Context, keys: Sequence[bytes], parent: bytes, first: int, *, last_partial: bool = False
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """See `Engine.export`."""
        own = self._own(context)
        check_export(first, len(keys), self.space.block_tokens, own.n, last_partial=last_partial)
        own.finish_load()
        return self._export(own, keys, parent, first, last_partial) if keys else iter(())

    def _export(
        self, context: LlamaContext, keys: Sequence[bytes], parent: bytes, first: int, last_partial: bool
    ) -> Iterator[npt.NDArray[np.uint8]]:
        size = self.space.block_tokens
        start, end = first * size, min((first + len(keys)) * size, context.n)
        fill = partial(self._fill, self._pool.read_rows(context, start, end), start)
        yield from export_blocks(
            self.space, self._layout, context, keys, parent, first, fill, last_partial=last_partial
        )

    def _fill(self, found: Rows, first: int, writer: BlockWriter, start: int, end: int) -> None:
        for layer, spec in enumerate(self.space.layers):
            for role in ("k", "v") if spec.blocked else ():
                rows = found[layer, role][start - first : end - first]
                rows = rows.reshape(end - start, spec.kv_heads, -1).transpose(1, 0, 2)
                writer.plane(layer, role).view(rows.dtype).reshape(rows.shape)[:] = rows

    def export_state(self, context: Context, key: bytes, parent: bytes, position: int) -> npt.NDArray[np.uint8]:
        """See `Engine.export_state`."""
        own = self._own(context)
        if position not in own.snapshots:
            raise EngineError(f"no states are kept at position {position}", fix=f"There are some at {list(own.states)}")
        windows, level = own.snapshots[position]
        return seal_windows(self.space, windows, level, own.tokens, key, parent)

    def crop(self, context: Context, n: int) -> bool:
        """See `Engine.crop`."""
        own = self._own(context)
        check_crop(n, own.n)
        if n == own.n:
            return True
        own.finish_load()
        windows, _ = own.snapshots.get(n, (None, ""))
        if (n and self.space.needs_state and windows is None) or not self._pool.crop(own, n, windows):
            return False
        own.snapshots = {at: kept for at, kept in own.snapshots.items() if at <= n}
        own.provenance.crop(n)
        # What is left of a checked draft goes on as it would have without.
        own.cropped = own.draft_start is None or n <= own.draft_start
        own.draft_start = None
        return True

    def first_rows(self, tokens: Tokens, positions: Tokens) -> tuple[int, npt.NDArray[np.float32]] | None:
        """See `Engine.first_rows`: the library computes no layer by itself."""
        return None

    def row_errors(
        self, context: Context, rows: Tokens
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """See `Engine.row_errors`: the library computes no tokens out of order."""
        return None

    def _own(self, context: Context) -> LlamaContext:
        own = check_kind(context, LlamaContext)
        own.check_usable()
        return own


class _Part(NamedTuple):
    """What of a context's tokens goes through the model now; ``left`` follow later, ``whole`` go in one run together.

    ``boundary``: where the run wants a snapshot of the windows; 0: nowhere. ``rows``: see `Engine.step`.
    """

    context: LlamaContext
    ids: Tokens
    left: int
    boundary: int
    whole: int
    rows: int


def _threads() -> int:
    """As many threads as torch would use: OMP_NUM_THREADS, else the processors of this process."""
    return int(os.environ.get("OMP_NUM_THREADS") or 0) or len(os.sched_getaffinity(0))
