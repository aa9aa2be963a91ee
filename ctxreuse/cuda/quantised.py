"""K or V in a device's memory quantised to int8 or int4, and back: the numbers of `ctxreuse.kernels.attention`.

Written for the functions that numpy and cupy share, so that tests run it with either.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ctxreuse.cuda.launch import Launcher
from ctxreuse.kernels.attention import GROUP, Plane

__all__ = ["expand_plane", "quantise_plane"]

_TINY: Final = np.float32(1e-30)  # its reciprocal would not be finite


def quantise_plane(launcher: Launcher, x: Any, format: str) -> Plane:
    """The plane of ``x`` float32 [heads, tokens, dim] as `quantise` of the CPU makes it, bit for bit.

    Raises ValueError for another format, numbers that are not finite, or (int4) beyond what half floats hold.
    """
    xp = launcher.xp
    if format == "int8":
        peak = xp.abs(x).max(2)
        if not bool(xp.isfinite(peak).all()):
            raise ValueError("values: not all are finite")
        peak = xp.where(peak < _TINY, np.float32(0), peak)
        with np.errstate(divide="ignore", over="ignore"):
            inverse = xp.where(peak > 0, np.float32(127) / peak, np.float32(0))
        codes = xp.rint(xp.clip(x * inverse[..., None], -127, 127)).astype(np.int8)
        return Plane(format, codes, peak / np.float32(127))
    if format != "int4" or x.shape[2] % GROUP:
        raise ValueError(f"values: {format!r} of {x.shape[2]} values; use int8, or int4 of a multiple of {GROUP}")
    heads, tokens, dim = x.shape
    groups = x.reshape(heads, tokens, dim // GROUP, GROUP)
    low = groups.min(3) + np.float32(0)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        size = xp.maximum(groups.max(3) + np.float32(0) - low, xp.abs(low)) / np.float32(15)
        bits = size.astype(np.float16).view(np.uint16).astype(np.int32)
        steps = (bits + 0x3F + (bits >> 7 & 1)) >> 7
        step = _of_steps(xp, steps)
        inverse = xp.where(step > 0, np.float32(1) / step, np.float32(0))
        eighths = xp.clip(xp.rint(np.float32(8) * low * inverse), -128, 127)
        base = eighths * (np.float32(0.125) * step)
    if not bool((xp.isfinite(low) & (bits < 0x7BC0) & (xp.abs(base) <= 65504)).all()):
        raise ValueError("values: not all are finite as half floats")
    codes = xp.rint(xp.clip((groups - base[..., None]) * inverse[..., None], 0, 15)).astype(np.uint8)
    half = GROUP // 2
    packed = codes[..., :half] | codes[..., half:] << np.uint8(4)
    scales = xp.stack([steps.astype(np.uint8), eighths.astype(np.int8).view(np.uint8)], 1)
    scales = xp.ascontiguousarray(scales.transpose(0, 1, 3, 2))
    return Plane(format, xp.ascontiguousarray(packed.reshape(heads, tokens, dim // 2)), scales)


def _of_steps(xp: Any, codes: Any) -> Any:
    """float32 of int4 steps: the upper bits of half floats without their sign."""
    return xp.ascontiguousarray(codes.astype(np.uint16) << np.uint16(7)).view(np.float16).astype(np.float32)


def expand_plane(launcher: Launcher, plane: Plane) -> Any:
    """float32 [heads, tokens, dim] on the device: what `dequantise` of the CPU gives."""
    xp, data, scales = launcher.xp, plane.data, plane.scales
    assert scales is not None
    if plane.format == "int8":
        return data.astype(np.float32) * scales[..., None]
    heads, tokens, half = data.shape
    packed = data.reshape(heads, tokens, 2 * half // GROUP, GROUP // 2)
    codes = xp.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], 3).astype(np.float32)
    steps, lows = (scales[:, i].transpose(0, 2, 1)[..., None] for i in range(2))
    step = _of_steps(xp, steps)
    low = xp.ascontiguousarray(lows).view(np.int8).astype(np.float32) * (np.float32(0.125) * step)
    return (low + codes * step).reshape(heads, tokens, 2 * half)
