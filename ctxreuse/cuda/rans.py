"""Tables of the entropy coder as the CUDA kernels read them: `native/cuda/rans.cuh`."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["CODE", "TABLE", "codes_of", "tables_of"]

TABLE: Final = np.dtype([("slot", "<u4", 256)])
CODE: Final = np.dtype([("span", "<u4", 32), ("reciprocal", "<u4", 32)])
"""struct RansTable and RansCode of the kernels' text."""

_CENTRE = 15


def tables_of(freqs: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
    """Tables for decoding, TABLE [tables], of frequencies uint8 [tables, 32] that RansTables has checked."""
    out = np.zeros(len(freqs), TABLE)
    symbol = np.arange(32, dtype=np.uint32)
    for row, freq, start in zip(out["slot"], freqs.astype(np.uint32), _spans(freqs) >> 8, strict=True):
        rest = np.arange(256, dtype=np.uint32) - np.repeat(start, freq)
        row[:] = np.repeat(freq | (symbol - _CENTRE & 255) << 16 | symbol << 24, freq) | rest << 8
    return out


def codes_of(freqs: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
    """Tables for encoding, CODE [tables]."""
    out = np.zeros(len(freqs), CODE)
    out["span"] = _spans(freqs)
    out["reciprocal"] = np.where(freqs > 0, 0xFFFFFFFF // np.maximum(freqs, 1).astype(np.uint32), 0)
    return out


def _spans(freqs: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    freq = freqs.astype(np.uint32)
    return np.where(freq > 0, freq | (np.cumsum(freq, 1, dtype=np.uint32) - freq) << 8, 0)
