"""One cell of the codec: vectors to integers and scale codes, and back. `native/klt/klt.h` defines the arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxreuse.codec.stream import Coder

__all__ = ["quantise", "reconstruct"]

_LIMIT = 32000
#: Codes further from 0x8000 would leave the range of float32; sums of |q| from here on that of int32 (|basis| <= 8191).
_SCALES, _REACH = 2048, 1 << 18
_F = np.float32
_POWERS = np.exp2(np.arange(32) / 32).astype(_F)
_THRESHOLDS = np.exp2((np.arange(16) - 15.5) / 16)

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def scales(codes: npt.NDArray[np.uint16], sign: int = 1) -> Floats:
    """2^(sign * (code - 0x8000) / 32) float32, from a table and an exponent, the same bits on every machine."""
    power = sign * (codes.astype(np.int32) - 0x8000)
    return np.asarray(np.ldexp(_POWERS[power & 31], power >> 5), _F)


def _energy(centred: Floats) -> Floats:
    energy = np.zeros(len(centred), _F)
    for c in range(centred.shape[1]):
        energy += centred[:, c] * centred[:, c]
    return energy


def _energy_by_halves(centred: Floats) -> Floats:
    sums = np.zeros((len(centred), 16), _F)
    for c in range(centred.shape[1]):
        sums[:, c % 16] += centred[:, c] * centred[:, c]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def quantise(
    x: Floats, coder: Coder, raw: npt.NDArray[np.bool_]
) -> tuple[Ints, npt.NDArray[np.uint16], npt.NDArray[np.bool_]]:
    """Vectors x float32 [tokens, C] to q int32 [components, tokens], scale codes and which tokens must stay raw."""
    group, active = coder.group, len(coder.coding.table)
    with np.errstate(all="ignore"):
        centred = x - group.mean
        energy = _energy(centred) if coder.whole is None else _energy_by_halves(centred)
        bad = raw | ~np.isfinite(energy)
        mantissa, exponent = np.frexp(
            np.where(bad, 0, energy).astype(np.float64) * (2.0 ** (-2 * group.log_rms) / x.shape[1])
        )
        code = 0x8000 + 16 * exponent - 16 + np.searchsorted(_THRESHOLDS, mantissa, side="right")
        code = np.where(mantissa == 0, 0x8000, code)
        code = np.maximum(code, 0x8000) if group.large else code
        bad |= np.abs(code - 0x8000) > _SCALES
        codes = np.where(bad, 0x8000, code).astype(np.uint16)
        if coder.whole is None:
            z = centred * scales(codes, -1)[:, None]
            y = np.zeros((active, len(x)), _F)
            for c in range(x.shape[1]):
                y += group.forward[:active, c, None] * z[None, :, c]
            step = _F(coder.step) / _F(3) if coder.nested else _F(coder.step)
            q = np.rint(y * (_F(1) / step))
        else:
            factor = scales(codes, -1) * _F(coder.whole.unit)
            whole = np.rint(np.clip(np.where(bad[:, None], 0, centred * factor[:, None]), -32767, 32767))
            rows = np.asarray(coder.whole.rows)[:active].astype(np.int64)
            sums = (rows @ whole.T.astype(np.int64)).astype(np.uint32).view(np.int32)
            q = np.rint(sums.astype(_F) * np.asarray(coder.whole.quantum)[:, None])
    bad |= ~(np.abs(q) <= _LIMIT).all(0)
    q = np.where(bad, 0, q).astype(np.int64)
    bad |= np.abs(q).sum(0) >= _REACH
    q[:, bad] = 0
    codes[bad] = 0x8000
    return ((q + 1) // 3 if coder.nested else q).astype(np.int32), codes, bad


def reconstruct(q: Ints, codes: npt.NDArray[np.uint16], coder: Coder) -> Floats:
    """q int32 [components, tokens] back to vectors float32 [tokens, C]."""
    group = coder.group
    sums = (q.T.astype(np.int64) @ group.basis[: len(q)].astype(np.int64)).astype(np.uint32).view(np.int32)
    factor = (scales(codes) * _F(coder.step))[:, None] * group.gain
    return np.asarray(factor * sums.astype(_F) + group.mean, _F)
