"""K and V of a run of tokens as attention reads them in place: quantised, or views of somebody's buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxreuse.kernels import rope_shift, shift_tables
from ctxreuse.kernels.attend import Plane
from ctxreuse.keys import Tokens
from ctxreuse.reuse.attend.select import Bounds, bounds_of

__all__ = ["Coded", "Held", "HeldMove", "Slab", "Turn"]


class Turn(NamedTuple):
    """How a layer turns K and queries: ``inv_freq`` radians a position; pairs (2i, 2i + 1) if ``interleaved``.

    No frequencies: it does not.
    """

    inv_freq: tuple[float, ...] = ()
    interleaved: bool = False

    def moved(self, q: NDArray[np.float32], shift: int) -> NDArray[np.float32]:
        """Queries [heads, n, dim] as they meet K that was held ``shift`` positions before the place it is used at.

        The product of a query and a key depends on the difference of their positions only, so that turning the few
        queries back does what turning all keys forward would do.
        """
        if not self.inv_freq or shift == 0:
            return q
        cos, sin = shift_tables(self.inv_freq, -shift)
        turned = np.empty_like(q)
        rope_shift(turned, q, q.shape, cos, sin, dst_dtype="fp32", interleaved=self.interleaved)
        return turned


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


class Coded(NamedTuple):
    """A `Slab` whose planes stay in a code: each look at ``k`` or ``v`` decodes that plane, which lives as long as it
    is looked at. ``plane(role)`` decodes. ``nbytes``: of the code."""

    plane: Callable[[str], Plane]
    nbytes: int
    first: int
    rows: int

    @property
    def k(self) -> Plane:
        """K, decoded anew."""
        return self.plane("k")

    @property
    def v(self) -> Plane:
        """V, decoded anew."""
        return self.plane("v")


class Held:
    """A run of tokens with the K and V of all layers; read-only, for any number of contexts at once and any thread.

    ``at``: the position of the first token where its K was rotated. ``layers``: by layer the slabs, one behind another,
    that hold the rows, cut alike in all layers. The planes may be views of somebody's buffers, which must outlive this.
    ``format`` names how they hold numbers, for people.
    """

    def __init__(self, tokens: Tokens, at: int, layers: Mapping[int, tuple[Slab | Coded, ...]], format: str) -> None:
        rows = {tuple((slab.first, slab.rows) for slab in slabs) for slabs in layers.values()}
        if len(rows) != 1 or sum(held for _, held in next(iter(rows))) != len(tokens):
            raise ValueError(f"layers do not hold the same rows of {len(tokens)} tokens")
        self.tokens, self.at, self.layers, self.format = tokens, at, dict(layers), format
        self._bounds: dict[tuple[int, int, int], Bounds] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Held({len(self)} tokens from {self.at}, {self.nbytes} bytes, {self.format})"

    @property
    def nbytes(self) -> int:
        """Bytes of K and V as they are held, scales included."""
        return sum(slab.nbytes for slabs in self.layers.values() for slab in slabs)

    def bounds(self, layer: int, slab: int, page: int) -> Bounds:
        """The bounds of a K plane's pages (of the whole plane, whatever rows the slab has); made once."""
        found = self._bounds.get((layer, slab, page))
        if found is None:
            found = self._bounds[layer, slab, page] = bounds_of(self.layers[layer][slab].k, page)
        return found


@dataclass(frozen=True, slots=True)
class HeldMove:
    """Rows ``row`` to ``row + count`` of a held run are to be seen at positions ``start`` to ``start + count``."""

    start: int
    held: Held
    row: int
    count: int
