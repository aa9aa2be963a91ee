"""CacheGen as its public code has it (SIGCOMM'24): scaled by the token's maximum, bins by layer, a table a channel."""

from __future__ import annotations

import numpy as np

from benchmarks.rivals.base import Coded, Values, bits_of, half

__all__ = ["CacheGen"]

#: Level -> bins of K by third of the layers, bins of V in the first two layers and in the others.
_BINS = {1: ((16, 16, 12), (16, 12)), 2: ((32, 16, 16), (32, 16)), 3: ((32, 32, 32), (32, 32))}
_TABLE_BITS = 16


class CacheGen:
    """No deltas, as in the code. Arithmetic coding with the chunk's own distribution a channel, so tables are sent.

    ``tables`` False counts them as nothing: less than any real use of it would store.
    """

    def __init__(self, level: int, *, tables: bool = True) -> None:
        self.family = "CacheGen" + ("" if tables else ", tables free")
        self.setting = f"level {level}"
        self._bins, self._tables = _BINS[level], tables

    def bins(self, role: str, layer: int, layers: int) -> int:
        """How many steps the scale has in this plane."""
        keys, values = self._bins
        return keys[min(3 * layer // layers, 2)] if role == "k" else values[0 if layer < 2 else 1]

    def code(self, values: Values, role: str, layer: int, layers: int) -> Coded:
        """See `Rival.code`."""
        bins = self.bins(role, layer, layers)
        top = bins // 2 - 1
        flat = values.reshape(len(values), -1)
        most = half(np.abs(flat).max(1, keepdims=True))
        scale = np.where(most > 0, most, 1) / top
        q = np.clip(np.rint(flat / scale), -top, top).astype(np.int64)
        back = (q * scale).astype(np.float32).reshape(values.shape)
        channels = flat.shape[1]
        at = q + top + bins * np.arange(channels)
        counts = np.bincount(at.ravel(), minlength=bins * channels).reshape(channels, bins)
        side = 16 * len(flat) + (_TABLE_BITS * (bins + 1) * channels if self._tables else 0)
        return Coded(back, bits_of(counts) + side)
