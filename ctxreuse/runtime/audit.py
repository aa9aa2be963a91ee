"""The audit of blocks from elsewhere: sampled rows of the first layer's K are computed again and compared.

A checksum says that bytes arrived as they were sent, not that they are right. K of the first layer depends on a token
and its position only, so a few rows cost one layer of a few tokens. Who makes up blocks must get every row of that
layer right, or is found out with a chance that grows with each block it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView
from ctxreuse.errors import FormatError
from ctxreuse.keys import Tokens

__all__ = ["TOLERANCE", "FirstRows", "Sample", "agree", "audit", "sample"]

#: Largest difference between a stored and a computed element, as a share of the largest computed one: several times
#: what another order of summation makes in each type, far below what another token or position makes.
TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 6e-2}

Rows = npt.NDArray[np.float32]

#: `Engine.first_rows`: (tokens [n], positions [n]) -> (layer, K [heads, n, k_dim]), or None if it cannot be checked.
FirstRows = Callable[[Tokens, Tokens], tuple[int, Rows] | None]


class Sample(NamedTuple):
    """Rows to compare: ``block[i]`` is the index of a view and ``row[i]`` the token in it; all arrays int32 [n]."""

    block: Tokens
    row: Tokens
    tokens: Tokens
    positions: Tokens


def sample(views: Sequence[BlockView], rows: int, seed: int) -> Sample:
    """Choose ``rows`` rows of these blocks (all, if they have fewer), none twice; equal arguments choose equally.

    Take a ``seed`` that whoever made the blocks cannot know.
    """
    counts = np.array([len(view.tokens) for view in views], np.int64)
    starts = np.cumsum(counts) - counts
    total = int(counts.sum())
    chosen = np.sort(np.random.default_rng(seed).choice(total, min(rows, total), replace=False))
    block = np.searchsorted(starts, chosen, side="right") - 1
    row = chosen - starts[block]
    tokens = [views[b].tokens[r] for b, r in zip(block, row)]
    positions = [views[b].header.end - counts[b] + r for b, r in zip(block, row)]
    return Sample(*(np.asarray(values, np.int32) for values in (block, row, tokens, positions)))


def agree(views: Sequence[BlockView], chosen: Sample, layer: int, expected: Rows) -> bool:
    """True if K of ``layer`` in the chosen rows is ``expected`` [heads, n, k_dim], to rounding.

    False also for blocks that have no such plane, another shape, a checksum that differs, or K that was rotated at
    other positions than the tokens have.
    """
    largest = float(np.abs(expected).max(initial=0.0))
    for i, (block, row) in enumerate(zip(chosen.block, chosen.row)):
        view = views[block]
        try:
            stored = view.array(layer, "k")
        except FormatError:
            return False
        plane = view.layout.planes[view.layout.index[layer, "k"]]
        shape = (expected.shape[0], len(view.tokens), expected.shape[2])
        if plane.shape != shape or plane.dtype not in TOLERANCE or view.header.rope_at != view.header.end - shape[1]:
            return False
        held = _floats(stored[:, row], plane.dtype)
        # Written so that NaN counts as a difference.
        if not bool((np.abs(held - expected[:, i]) <= TOLERANCE[plane.dtype] * largest).all()):
            return False
    return True


def _floats(values: npt.NDArray[np.generic], dtype: str) -> Rows:
    if dtype == "bfloat16":  # comes as its bits, the upper half of a float32's
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def audit(views: Sequence[BlockView], first_rows: FirstRows, *, rows: int = 8, seed: int) -> bool:
    """Compare ``rows`` sampled rows of blocks of one space; False if one differs.

    True also where the model has nothing that could be compared so. Pure, apart from the engine's computing.
    """
    if not views:
        return True
    chosen = sample(views, rows, seed)
    found = first_rows(chosen.tokens, chosen.positions)
    return found is None or agree(views, chosen, *found)
