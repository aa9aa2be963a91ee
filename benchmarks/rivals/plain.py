"""A plain quantiser with entropy coding: centred, scaled by the token's RMS, one uniform step, eight classes."""

from __future__ import annotations

import numpy as np

from benchmarks.rivals.base import Coded, Values, bits_of, half, table_256

__all__ = ["Plain"]

_CLASSES, _LARGEST = 8, 15


class Plain:
    """Ours without calibration: the chunk's own means, no transform, channel classes by spread with 8-bit tables.

    Values beyond ±15 steps are escaped: 16 bits more, never clipped. Tables, classes, means and scales are counted.
    """

    family = "centred uniform step"

    def __init__(self, step: float) -> None:
        self.setting = f"step {step:g}"
        self._step = step

    def code(self, values: Values, role: str, layer: int, layers: int) -> Coded:
        """See `Rival.code`."""
        flat = values.reshape(len(values), -1)
        tokens, channels = flat.shape
        mean = half(flat.mean(0))
        scale = half(np.sqrt(((flat - mean) ** 2).mean(1, keepdims=True))) * np.float32(self._step)
        q = np.rint((flat - mean) / np.where(scale > 0, scale, 1)).astype(np.int64)
        back = (q * scale + mean).astype(np.float32).reshape(values.shape)
        escaped = np.abs(q) > _LARGEST
        symbols = np.where(escaped, 2 * _LARGEST + 1, q + _LARGEST)
        rank = np.argsort(np.argsort(q.std(0), kind="stable"), kind="stable")
        classes = rank * _CLASSES // channels
        width = 2 * _LARGEST + 2
        counts = np.bincount((symbols + width * classes).ravel(), minlength=_CLASSES * width).reshape(_CLASSES, width)
        side = 16 * channels + 16 * tokens + 3 * channels + 8 * counts.size + 16 * int(escaped.sum())
        return Coded(back, bits_of(counts, table_256(counts)) + side)
