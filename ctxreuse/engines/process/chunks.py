"""Chunk reuse in an engine's process: see `ctxreuse.engines.chunks.ChunkOps`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ctxreuse.engines.base import Context, Logits
from ctxreuse.engines.chunks import CompressedFormat, Relocation, Role
from ctxreuse.engines.process.connection import Result
from ctxreuse.engines.process.context import ChildContext
from ctxreuse.engines.process.wire import encode_headers
from ctxreuse.identity.keys import Tokens, as_tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["ChildChunkOps"]


class ChildChunkOps:
    """See `ChunkOps`; runs are not attended to in place, which would need the blocks in both processes."""

    def __init__(self, space: ModelSpace, own: Callable[[Context], ChildContext], call: Callable[..., Result]) -> None:
        self._space, self._own, self._call = space, own, call

    def insert_rows(
        self, context: Context, tokens: Tokens, rows: Sequence[Relocation], level: str, *, rotate: bool = True
    ) -> None:
        """See `ChunkOps.insert_rows`. Blocks are passed once, however many of their rows are inserted."""
        own, ids = self._own(context), as_tokens(tokens)
        views = {id(one.view): one.view for one in rows}
        order = {key: i for i, key in enumerate(views)}
        blocks = [np.frombuffer(view.buffer, np.uint8) for view in views.values()]
        starts, heads = [view.start for view in views.values()], encode_headers(list(views.values()))
        spans = [(one.start, order[id(one.view)], one.row, one.count) for one in rows]
        self._call("insert_rows", spans, starts, level, rotate, on=[own], appended=[ids], arrays=[ids, heads, *blocks])

    def compress(self, context: Context, format: CompressedFormat, level: str) -> None:
        """See `CompressingOps.compress`."""
        self._call("compress", format, level, on=[self._own(context)])

    def deviations(
        self, context: Context, rows: Tokens, layer: int, role: Role
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """See `ChunkOps.deviations`."""
        at = as_tokens(rows)
        found = self._call("deviations", layer, role, on=[self._own(context)], arrays=[at], room=2 * at.nbytes + 128)
        return found.arrays[0], found.arrays[1]

    def attention(
        self, context: Context, rows: Tokens, tokens: Tokens, *, queries: int, layers: int
    ) -> npt.NDArray[np.float32]:
        """See `ChunkOps.attention`."""
        at, ids = as_tokens(rows), as_tokens(tokens)
        own = self._own(context)
        found = self._call("attention", queries, layers, on=[own], arrays=[at, ids], room=at.nbytes + 64)
        sums: npt.NDArray[np.float32] = found.arrays[0]
        return sums

    def recompute_rows(
        self, context: Context, rows: Tokens, tokens: Tokens, *, drift: Sequence[tuple[int, int]] = ()
    ) -> Logits:
        """See `ChunkOps.recompute_rows`."""
        own, at, ids = self._own(context), as_tokens(rows), as_tokens(tokens)
        room = 4 * self._space.vocab_size + 64
        arrays, spans = [at, ids], [tuple(span) for span in drift]
        found = self._call("recompute_rows", spans, on=[own], appended=[ids], arrays=arrays, room=room)
        logits: Logits = found.arrays[0]
        return logits
