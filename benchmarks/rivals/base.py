"""What every rival is: a function from a plane to what comes back of it and the bits it took."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Coded", "Rival", "Values", "bits_of", "half", "table_256"]

#: float32 [tokens, heads, dim]: K (not rotated) or V of one layer.
Values: TypeAlias = npt.NDArray[np.float32]


class Coded(NamedTuple):
    """What a decoder gives back, and the size of the code with all of its side data, in bits."""

    values: Values
    bits: float


class Rival(Protocol):
    """One codec at one setting; stateless."""

    @property
    def family(self) -> str:
        """Its name, equal for all settings."""
        ...

    @property
    def setting(self) -> str:
        """What tells it from the others of its family."""
        ...

    def code(self, values: Values, role: str, layer: int, layers: int) -> Coded:
        """Code and decode ``role`` (``k`` or ``v``) of layer ``layer`` of ``layers``; ``values`` stays as it is."""
        ...


def half(values: npt.NDArray[np.floating]) -> Values:
    """The numbers as they come back from 16-bit floats."""
    return values.astype(np.float16).astype(np.float32)


def bits_of(counts: npt.NDArray[np.integer], shares: npt.NDArray[np.floating] | None = None) -> float:
    """Bits of an ideal coder for symbols that occur ``counts`` [tables, symbols] times, a table a row.

    ``shares``: what the coder believes them to be, of the same shape and positive where counts are; None: their own
    frequencies.
    """
    counts = np.asarray(counts, np.float64)
    believed = counts / np.maximum(counts.sum(-1, keepdims=True), 1) if shares is None else shares
    seen = counts > 0
    return float(-(counts[seen] * np.log2(believed[seen])).sum())


def table_256(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Shares of ``counts`` [tables, symbols] in steps of 1/256, at least one step for what occurs."""
    counts = np.asarray(counts, np.float64)
    parts = np.where(counts > 0, np.maximum(np.rint(256 * counts / np.maximum(counts.sum(-1, keepdims=True), 1)), 1), 0)
    # The most frequent symbol takes what rounding left over.
    rows = np.arange(len(parts))
    parts[rows, counts.argmax(-1)] += 256 - parts.sum(-1)
    return parts / 256
