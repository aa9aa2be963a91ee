"""Contexts with relocated rows, for tests of engines: sources, pieces in another order, and K and V to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, parse
from ctxreuse.engines.base import Engine, Logits
from ctxreuse.engines.chunks import ChunkEngine, RelocatedContext, Relocation
from ctxreuse.identity.keys import Tokens
from ctxreuse.testing.sealed import Sealed, random_tokens, seal

__all__ = ["BLOCKS", "LEVEL", "ChunkContexts", "ChunkReuseEngine", "relocations_of"]

BLOCKS = 5
LEVEL = "approx~kl-0.05"


class ChunkReuseEngine(Engine, ChunkEngine, Protocol):
    """An engine that reuses chunks."""


def relocations_of(views: Sequence[BlockView], first: int, count: int, start: int) -> Iterator[Relocation]:
    """Relocations of the tokens ``first`` to ``first + count`` of consecutive blocks to positions from ``start``."""
    size = len(views[0].header.tokens) // 4
    at = first
    while at < first + count:
        n = min(size - at % size, first + count - at)
        yield Relocation(start + at - first, views[at // size], at % size, n)
        at += n


class ChunkContexts:
    """What the contracts of chunk reuse share."""

    #: Largest |difference| of logits between two ways to compute the same numbers, as a share of the largest |logit|.
    tolerance = 1e-5
    #: False for a model that adds positions to its tokens: rotating K does not change the position that it encodes.
    relative = True

    def close(self, a: Logits, b: Logits) -> bool:
        """True if two logits differ by rounding only."""
        return bool(np.abs(a - b).max() <= self.tolerance * np.abs(b).max())

    def source(self, engine: ChunkReuseEngine) -> tuple[Tokens, list[BlockView]]:
        """Tokens of a context, and its blocks."""
        ids = random_tokens(engine, BLOCKS * engine.space.block_tokens)
        return ids, [parse(data) for data in seal(engine, ids).blocks]

    def start(self, engine: ChunkReuseEngine, tokens: Tokens | None = None) -> RelocatedContext:
        """A context of ``tokens`` that were computed."""
        context = engine.new_context()
        assert isinstance(context, RelocatedContext)
        if tokens is not None:
            engine.prefill(context, tokens)
        return context

    def rows(
        self, engine: ChunkReuseEngine, context: RelocatedContext
    ) -> dict[tuple[int, str], npt.NDArray[np.float64]]:
        """K and V [heads, tokens, dim] of the whole blocks of a context."""
        sealed = [parse(data) for data in Sealed(engine, context).blocks]
        parts = {(p.layer, p.role): [v.array(p.layer, p.role) for v in sealed] for p in sealed[0].layout.planes}
        return {at: np.concatenate([_wide(plane) for plane in planes], axis=1) for at, planes in parts.items()}

    def shuffled(self, engine: ChunkReuseEngine) -> tuple[RelocatedContext, list[tuple[int, int, int]]]:
        """A computed head, then relocated pieces of a source, with a gap; the pieces as (source, start, end)."""
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        context = self.start(engine, random_tokens(engine, size // 2, seed=1))
        cuts = [(2 * size + 3, size + 5), (size, size), (5, 2), (0, 2 * size - 1)]
        tokens, moves, pieces, at = list[Tokens](), list[Relocation](), [], context.n
        for first, count in cuts:
            moves += relocations_of(views, first, count, at)
            tokens.append(ids[first : first + count])
            pieces.append((first, at, at + count))
            at += count
            if count == 2:  # a gap
                tokens.append(random_tokens(engine, 7, seed=2))
                at += 7
        engine.chunks.insert_rows(context, np.concatenate(tokens), moves, LEVEL)
        return context, pieces


def _wide(plane: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    if plane.dtype == np.uint16:  # the bits of bfloat16
        return (plane.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return plane.astype(np.float64)
