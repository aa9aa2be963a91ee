"""Pinned runs: K and V of a run of tokens as attention reads them in place, quantised or as views of other buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxreuse.identity.keys import Tokens
from ctxreuse.kernels import rope_shift
from ctxreuse.kernels.attention import Plane
from ctxreuse.reuse.inplace.pages import Bounds, bounds_of
from ctxreuse.rope import Rotary

__all__ = ["AttachedRun", "CodedSlab", "PinnedRun", "Slab", "rotated_queries"]


def rotated_queries(q: NDArray[np.float32], rotary: Rotary, shift: int) -> NDArray[np.float32]:
    """Rotate queries [heads, n, dim] to meet K of a run that is attached ``shift`` positions behind its own place.

    The product of a query and a key depends on the difference of their positions only, so rotating the few queries
    back does what rotating all keys forward would do.
    """
    if rotary.style == "none" or shift == 0:
        return q
    cos, sin, interleaved = rotary.shift(-shift)
    rotated = np.empty_like(q)
    rope_shift(rotated, q, q.shape, cos, sin, dst_dtype="fp32", interleaved=interleaved)
    return rotated


class Slab(NamedTuple):
    """Rows ``first`` to ``first + rows`` of a K and a V plane."""

    k: Plane
    v: Plane
    first: int
    rows: int

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, scales included."""
        return sum(plane.nbytes * self.rows // plane.tokens for plane in (self.k, self.v))


class CodedSlab(NamedTuple):
    """A `Slab` whose planes stay coded: ``plane(role)`` decodes one at each access. ``nbytes``: of the code."""

    plane: Callable[[str], Plane]
    nbytes: int
    first: int
    rows: int

    @property
    def k(self) -> Plane:
        """K, decoded again."""
        return self.plane("k")

    @property
    def v(self) -> Plane:
        """V, decoded again."""
        return self.plane("v")


class PinnedRun:
    """A run of tokens with the K and V of all layers; read-only, for any number of contexts at once and any thread.

    ``at``: the position of the first token where its K was rotated. ``layers``: by layer the slabs, one behind another,
    that hold the rows, cut alike in all layers. The planes may be views of other buffers, which must outlive the run.
    ``format``: how numbers are stored, for people.
    """

    def __init__(
        self, tokens: Tokens, at: int, layers: Mapping[int, tuple[Slab | CodedSlab, ...]], format: str
    ) -> None:
        rows = {tuple((slab.first, slab.rows) for slab in slabs) for slabs in layers.values()}
        if len(rows) != 1 or sum(count for _, count in next(iter(rows))) != len(tokens):
            raise ValueError(f"layers do not hold the same rows of {len(tokens)} tokens")
        self.tokens, self.at, self.layers, self.format = tokens, at, dict(layers), format
        self._bounds: dict[tuple[int, int, int], Bounds] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"PinnedRun({len(self)} tokens from {self.at}, {self.nbytes} bytes, {self.format})"

    @property
    def nbytes(self) -> int:
        """Bytes of K and V as they are stored, scales included."""
        return sum(slab.nbytes for slabs in self.layers.values() for slab in slabs)

    def bounds(self, layer: int, slab: int, page: int) -> Bounds:
        """The bounds of a K plane's pages (of the whole plane, whatever rows the slab has); computed once."""
        found = self._bounds.get((layer, slab, page))
        if found is None:
            found = self._bounds[layer, slab, page] = bounds_of(self.layers[layer][slab].k, page)
        return found


@dataclass(frozen=True, slots=True)
class AttachedRun:
    """Rows ``row`` to ``row + count`` of a pinned run, attached at positions ``start`` to ``start + count``."""

    start: int
    run: PinnedRun
    row: int
    count: int
