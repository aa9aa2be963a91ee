"""KVTC (arXiv 2511.01815): one PCA over all layers and heads, bits by dynamic programming, DEFLATE.

Keys (not rotated) and values have a basis each, from texts read once; as a codec keeps it beside the model, it counts
for nothing. A token's coefficients are cut into groups, each with a type of 0, 2, 4 or 8 bits and, of its own, a scale
and a shift in float16; sizes and types are those of the least squared error on the learnt texts at so many bits a
value. The published one leaves the last 128 tokens raw, which would be a sixth of what is coded here: none are.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.rivals.base import Values, bits_of, half

__all__ = ["Group", "Kvtc", "KvtcBasis"]

_SIZES, _WIDTHS = (16, 64, 256, 1024), (0, 2, 4, 8)
#: Bits of a group's scale and shift, a token.
_SIDE = 32
#: Components that are kept; what the others hold is lost in any setting. And tokens that the allocation is tried on.
_RANK, _TRIED = 4096, 1024


class Group(NamedTuple):
    """Components from ``first`` on, ``size`` of them, at ``width`` bits each."""

    first: int
    size: int
    width: int


class KvtcBasis(NamedTuple):
    """What is learnt of one role: ``mean`` [channels], ``vectors`` [channels, rank] with the largest variance first,
    and squared errors of every group that may be, on the learnt tokens, with its bits; both a token."""

    mean: npt.NDArray[np.float32]
    vectors: npt.NDArray[np.float32]
    errors: Mapping[Group, float]

    @classmethod
    def learn(cls, rows: npt.NDArray[np.float32]) -> KvtcBasis:
        """From the channels of all layers and heads, float32 [tokens, channels]."""
        mean = rows.mean(0)
        centred = rows - mean
        _, vectors = np.linalg.eigh(centred.T @ centred)
        rank = min(_RANK, len(rows), rows.shape[1]) // _SIZES[0] * _SIZES[0]
        vectors = np.ascontiguousarray(vectors[:, ::-1][:, :rank])
        y = centred[:: max(1, len(rows) // _TRIED)] @ vectors
        groups = [
            Group(first, size, width)
            for size in _SIZES
            for first in range(0, rank - size + 1, _SIZES[0])
            for width in _WIDTHS
        ]
        errors = {group: float(np.square(y[:, _at(group)] - _coded(y, group)[0]).sum() / len(y)) for group in groups}
        return cls(mean, vectors, errors)

    def plan(self, bits: float) -> list[Group]:
        """The groups of least error that take at most ``bits`` a channel, before entropy coding."""
        low, high = 1e-9, 1e9  # what a bit may cost in squared error
        for _ in range(60):
            price = (low * high) ** 0.5
            if sum(map(_bits, self._cheapest(price))) > bits * len(self.mean):
                low = price
            else:
                high = price
        return self._cheapest(high)

    def _cheapest(self, price: float) -> list[Group]:
        """The cut of all components into groups with the least error plus ``price`` times bits."""
        rank = self.vectors.shape[1]
        best: dict[int, tuple[float, list[Group]]] = {0: (0.0, [])}
        ends: dict[int, list[tuple[Group, float]]] = {}
        for group, error in self.errors.items():
            ends.setdefault(group.first + group.size, []).append((group, error))
        for end in range(_SIZES[0], rank + 1, _SIZES[0]):
            cost, last = min((best[g.first][0] + error + price * _bits(g), g) for g, error in ends[end])
            best[end] = cost, [*best[last.first][1], last]
        return best[rank][1]


def _at(group: Group) -> slice:
    return slice(group.first, group.first + group.size)


def _bits(group: Group) -> float:
    """Of one token; a type of no bits has no side data, as it is known beforehand."""
    return group.size * group.width + _SIDE if group.width else 0


def _coded(y: Values, group: Group) -> tuple[Values, npt.NDArray[np.uint8]]:
    """What comes back of a group's coefficients in ``y`` [tokens, rank], and their codes."""
    part = y[:, _at(group)]
    if not group.width:
        return np.zeros_like(part), np.zeros((0, 0), np.uint8)
    low, high = part.min(1, keepdims=True), part.max(1, keepdims=True)
    steps = 2**group.width - 1
    shift, scale = half(low), half((high - low) / steps)
    codes = np.clip(np.rint((part - shift) / np.where(scale > 0, scale, 1)), 0, steps)
    return (codes * scale + shift).astype(np.float32), codes.astype(np.uint8)


class Kvtc:
    """All planes of a context at about ``bits`` a value before entropy coding. See `benchmarks.rivals.base.Rival`."""

    family = "KVTC"

    def __init__(self, bits: float) -> None:
        self.setting = f"{bits:g} bit"
        self._bits = bits

    def code(self, rows: Values, basis: KvtcBasis) -> tuple[Values, float]:
        """Code all layers of one role, [tokens, channels]; returns what comes back, and the bits that it took.

        The codes of a group by DEFLATE, or by an ideal coder whose table costs nothing, whichever is less.
        """
        y = ((rows - basis.mean) @ basis.vectors).astype(np.float32)
        back, bits = np.zeros_like(y), 0.0
        for group in basis.plan(self._bits):
            back[:, _at(group)], codes = _coded(y, group)
            if group.width:
                packed = np.packbits(np.unpackbits(codes[..., None], axis=-1)[..., -group.width :].ravel())
                bits += min(8 * len(zlib.compress(packed.tobytes(), 9)), bits_of(np.bincount(codes.ravel())))
                bits += _SIDE * len(rows)
        values = (back @ basis.vectors.T + basis.mean).astype(np.float32)
        return values, bits
