"""Catches a peer that lies about K: sampled rows of the first layer are computed and compared."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ctxreuse.levels import is_exact, is_raw

if TYPE_CHECKING:
    from ctxreuse.block import BlockView
    from ctxreuse.engines.base import Engine

__all__ = ["SAMPLES", "first_k_matches"]

#: Rows compared of one fetch. Computing them takes one layer of so many tokens: about 2 ms for SmolLM2.
SAMPLES = 8
#: Largest difference that rounding explains, as a share of the row's largest value: other kernels, other batch sizes.
_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}

#: Largest squared difference of lossy rows, all together, as a share of their squares: those of rubbish are above 1.
_LOSSY = 0.8


def first_k_matches(engine: Engine, views: Sequence[BlockView], rng: Random, samples: int = SAMPLES) -> bool | None:
    """Whether K of the first layer is what this engine computes for the token ids that the blocks name.

    Compares ``samples`` rows at random over ``views`` (blocks of the engine's space with the engine's layout, anywhere
    in a context, at any level that it can decode; only their planes of the first layer are read). None: the model's
    first layer keeps no K of all tokens, so nothing can be said. Raises FormatError if a plane that is read is corrupt.

    It proves little about the deeper layers, which depend on all tokens before: a peer that computes the first layer
    and invents the rest passes. It catches the wrong model, wrong positions, rubbish, and random corruption under right
    checksums. Of lossy blocks it asks for less: numbers that have more to do with the right ones than with nothing.
    """
    space = engine.space
    picks = [(rng.choice(views), rng.randrange(space.block_tokens)) for _ in range(samples if views else 0)]
    if not picks:
        return None
    tokens = np.array([view.tokens[row] for view, row in picks], np.int32)
    if int(tokens.min()) < 0 or int(tokens.max()) >= space.vocab_size:
        return False
    positions = np.array([view.header.end - space.block_tokens + row for view, row in picks], np.int32)
    if int(positions.min()) < 0 or int(positions.max()) >= space.max_tokens:
        return False
    found = engine.first_rows(tokens, positions)
    if found is None:
        return None
    layer, rows = found
    off = size = 0.0
    for i, (view, row) in enumerate(picks):
        stored, level = _floats(_plane(engine, view, layer)[:, row]), view.header.level
        if is_exact(level):
            # Written so that a NaN fails.
            if not np.abs(stored - rows[:, i]).max() <= _TOLERANCE[space.dtype] * np.abs(rows[:, i]).max():
                return False
        else:
            off += float(((stored - rows[:, i]) ** 2).sum())
            size += float((rows[:, i] ** 2).sum())
    return bool(off <= _LOSSY * size)


def _plane(engine: Engine, view: BlockView, layer: int) -> npt.NDArray[np.generic]:
    """K of a layer, [heads, tokens, dim]."""
    if is_raw(view.header.level) or engine.codec is None:
        return view.array(layer, "k")
    spec, space = engine.space.layers[layer], engine.space
    kind = np.float32 if space.dtype == "float32" else np.uint16 if space.dtype == "bfloat16" else np.float16
    bits = np.empty((spec.kv_heads, len(view.tokens), spec.k_dim), f"u{np.dtype(kind).itemsize}")
    engine.codec.fill([view], layer, "k", bits, 0)
    return bits.view(kind)


def _floats(row: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """float32 of a row as it stands in a block, where bfloat16 is its bits in uint16."""
    if row.dtype == np.uint16:
        return (row.astype(np.uint32) << 16).view(np.float32)
    return row.astype(np.float32)
