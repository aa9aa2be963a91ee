"""KIVI (arXiv 2402.02750): keys quantised by channel, values by token, minimum and scale a group of 32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.rivals.base import Coded, Values, half

__all__ = ["Kivi", "asymmetric"]


def asymmetric(values: npt.NDArray[np.float32], bits: int, group: int) -> tuple[npt.NDArray[np.float32], int]:
    """Quantise groups of ``group`` along the last axis to 2^bits levels from their minimum on; (values back, groups).

    Minimum and scale are float16. The last group of a row may be smaller.
    """
    length = values.shape[-1]
    groups = -(-length // group)
    room = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, groups * group - length)], mode="edge")
    cut = room.reshape(*values.shape[:-1], groups, group)
    low = cut.min(-1, keepdims=True)
    scale = half((cut.max(-1, keepdims=True) - low) / (2**bits - 1))
    low = half(low)
    q = np.clip(np.rint((cut - low) / np.where(scale > 0, scale, 1)), 0, 2**bits - 1)
    back = (q * scale + low).reshape(room.shape)[..., :length]
    return back.astype(np.float32), groups * values[..., 0].size


class Kivi:
    """``bits`` a value, plus 32 bits a group of 32. All tokens are coded: its window of recent ones serves decoding."""

    family = "KIVI"

    def __init__(self, bits: int, group: int = 32) -> None:
        self.setting = f"{bits} bit"
        self._bits, self._group = bits, group

    def code(self, values: Values, role: str, layer: int, layers: int) -> Coded:
        """See `Rival.code`."""
        flat = values.reshape(len(values), -1)
        back, groups = asymmetric(flat.T if role == "k" else flat, self._bits, self._group)
        back = back.T if role == "k" else back
        return Coded(np.ascontiguousarray(back).reshape(values.shape), self._bits * values.size + 32.0 * groups)
