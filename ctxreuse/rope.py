"""Rotary position embedding (RoFormer, arXiv 2104.09864): how a layer rotates K, and the angles that do it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Rotary", "RotaryStyle", "Rotation", "Tables", "inverse_frequencies", "shift_tables"]

RotaryStyle = Literal["half", "pairs", "none"]
Floats: TypeAlias = NDArray[np.float32]
#: Cosines and sines, float32 [rows, pairs] each.
Tables: TypeAlias = tuple[Floats, Floats]


class Rotation(NamedTuple):
    """One shift for all rows: ``cos`` and ``sin`` float32 [pairs]; pairs are (2i, 2i + 1) if ``interleaved``."""

    cos: Floats
    sin: Floats
    interleaved: bool = False


class Rotary(msgspec.Struct, frozen=True, dict=True):
    """How a layer rotates K at position p: pair i of the first 2 * len(inv_freq) dims by p * inv_freq[i] radians.

    ``half``: dims i and i + r/2 are a pair; ``pairs``: dims 2i and 2i + 1; ``none``: K is not rotated. ``scale`` is the
    factor that the model puts on cosine and sine (YaRN's attention factor). Thread-safe.
    """

    style: RotaryStyle
    inv_freq: tuple[float, ...] = ()
    scale: float = 1.0

    @property
    def pairs(self) -> tuple[slice, slice]:
        """The dims that are the first of a pair, and those that are the second."""
        half = len(self.inv_freq)
        if self.style == "pairs":
            return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        return slice(0, half), slice(half, 2 * half)

    def tables(self, positions: NDArray[np.integer], *, undo: bool = False) -> Tables:
        """Cosines and sines that rotate K to ``positions`` [rows]; with ``undo``, back from them.

        Angles are products in float64: in float32 an angle of 10^5 rad is off by up to 0.004 rad.
        """
        angles = np.asarray(positions, np.float64)[:, None] * self._frequencies
        factor = 1 / self.scale if undo else self.scale
        cos, sin = np.cos(angles) * factor, np.sin(angles) * (-factor if undo else factor)
        return cos.astype(np.float32), sin.astype(np.float32)

    def span_tables(self, start: int, tokens: int, *, undo: bool = False) -> Tables:
        """`tables` of positions ``start`` to ``start + tokens``, computed once: read-only views."""
        return self._spans.get(start, tokens, undo)

    def rotate(self, k: Floats, positions: NDArray[np.integer], *, undo: bool = False) -> Floats:
        """K [..., rows, dim] rotated to ``positions`` [rows], or back from them; a new array."""
        out, (cos, sin) = k.copy(), self.tables(positions, undo=undo)
        first, second = self.pairs
        with np.errstate(all="ignore"):
            out[..., first] = k[..., first] * cos - k[..., second] * sin
            out[..., second] = k[..., second] * cos + k[..., first] * sin
        return out

    def shift(self, delta: int) -> Rotation:
        """What moves rotated K by ``delta`` positions (negative: backwards), see `shift_tables`."""
        return Rotation(*shift_tables(self._frequencies, delta), self.style == "pairs")

    @cached_property
    def _frequencies(self) -> NDArray[np.float64]:
        return np.asarray(self.inv_freq, np.float64)

    @cached_property
    def _spans(self) -> _SpanTables:
        return _SpanTables(self)


class _SpanTables:
    """Tables of spans of positions: one of the first 32,768, and the few last used beyond."""

    _MOST, _RANGES = 1 << 15, 8

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._first: dict[bool, Tables] = {}
        self._beyond: OrderedDict[tuple[int, int, bool], Tables] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, start: int, tokens: int, undo: bool) -> Tables:
        end = start + tokens
        if min(start, tokens) < 0:
            raise ValueError(f"positions {start} to {end} are out of range")
        if end > self._MOST:
            return self._far(start, tokens, undo)
        table = self._first.get(undo)
        if table is None or len(table[0]) < end:
            with self._lock:
                table = self._first.get(undo)
                if table is None or len(table[0]) < end:
                    table = self._first[undo] = self._made(0, max(1 << (end - 1).bit_length(), 1024), undo)
        return table[0][start:end], table[1][start:end]

    def _far(self, start: int, tokens: int, undo: bool) -> Tables:
        key = (start, tokens, undo)
        with self._lock:
            found = self._beyond.get(key)
            if found is not None:
                self._beyond.move_to_end(key)
                return found
        made = self._made(start, tokens, undo)
        with self._lock:
            self._beyond[key] = made
            while len(self._beyond) > self._RANGES:
                self._beyond.popitem(last=False)
        return made

    def _made(self, start: int, tokens: int, undo: bool) -> Tables:
        cos, sin = self._rotary.tables(np.arange(start, start + tokens), undo=undo)
        cos.flags.writeable = sin.flags.writeable = False
        return cos, sin


def inverse_frequencies(theta: float, rotary_dim: int) -> NDArray[np.float64]:
    """theta^(-2i/r) for i < r/2, shape (r/2,) (RoFormer, section 3.2.2).

    For plain RoPE only: models with scaled frequencies (llama3, yarn, linear) must hand over their own. ValueError
    unless theta > 0 and rotary_dim is even and positive.
    """
    if not theta > 0 or rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary embedding needs theta > 0 and an even positive width, got {theta} and {rotary_dim}")
    return np.asarray(theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim))


def shift_tables(inv_freq: ArrayLike, delta: int) -> Tables:
    """(cos, sin) float32, shape (r/2,), that move rotated K by ``delta`` positions (negative: backwards).

    Rotations compose: R(p + delta) = R(delta) R(p), so neither the old nor the new position matters, and an attention
    scaling already in K (YaRN) stays in it. ValueError for a shape that is not (n,) or values that are not finite.
    """
    frequencies = np.asarray(inv_freq, dtype=np.float64)
    if frequencies.ndim != 1 or not np.isfinite(frequencies).all():
        raise ValueError(f"inv_freq must be one finite row, got shape {frequencies.shape}")
    angles = frequencies * delta
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
