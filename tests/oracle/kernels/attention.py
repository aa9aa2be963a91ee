"""Attention over quantised parts in plain numpy and float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxreuse.kernels.attention import Part, Plane

__all__ = ["attend", "dequantise", "merge", "quantise", "widen"]

Floats = NDArray[np.float32]

_GROUP = 32
_LEAST = np.float32(1e-30)  # a row whose largest value is below it is zeros: its reciprocal would not be finite


def widen(x: NDArray[Any], format: str) -> Floats:
    """float32 of float32, float16 or bfloat16 (uint16 bits)."""
    if format == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def quantise(x: Floats, format: str) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Codes and scales of float32 [heads, tokens, dim], as `ctxreuse.kernels.attention` describes them."""
    if format == "fp32":
        return x, None
    if format == "fp16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16), None
    if format == "bf16":
        return _bf16(x), None
    if not np.isfinite(x).all():
        raise ValueError("values: not finite")
    if format == "int8":
        return _int8(x)
    return _int4(x)


def _bf16(x: Floats) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def _int8(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    most = np.abs(x).max(2, initial=0)
    most = np.where(most < _LEAST, np.float32(0), most)
    inverse = np.float32(127) / np.where(most > 0, most, np.float32(np.inf))
    codes = np.rint(np.clip(x * inverse[..., None], -127, 127)).astype(np.int8)
    return codes, (most / np.float32(127)).astype(np.float32)


def _steps(codes: NDArray[Any]) -> Floats:
    """Five bits of exponent and three of mantissa as float32."""
    exponent, mantissa = codes.astype(np.int64) >> 3, codes.astype(np.int64) & 7
    return np.ldexp(np.where(exponent, 8 + mantissa, mantissa), np.maximum(exponent, 1) - 18).astype(np.float32)


def _int4(x: Floats) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    heads, tokens, dim = x.shape
    if dim % _GROUP:
        raise ValueError(f"int4 needs dim in groups of {_GROUP}, got {dim}")
    grouped = x.reshape(heads, tokens, dim // _GROUP, _GROUP)
    zero = np.float32(0)  # added, so that there is no -0
    low, high = grouped.min(3, initial=np.inf) + zero, grouped.max(3, initial=-np.inf) + zero
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        size = (np.maximum(high - low, np.abs(low)) / np.float32(15)).astype(np.float16).astype(np.float64)
        if not (size < 63488).all():  # half of the way from the largest step, 61440, to the one that would follow
            raise ValueError("values: beyond what half floats hold")
    place = np.where(size > 0, np.maximum(np.frexp(size)[1] - 1, -14), -14)
    eighths = np.rint(np.ldexp(size, 3 - place)).astype(np.int64)  # of 2^place, nearest even
    step = ((place + 14 << 3) + eighths).astype(np.int64)
    wide = _steps(step)
    inverse = (np.where(wide > 0, 1, 0) / np.where(wide > 0, wide, np.float32(1))).astype(np.float32)
    lows = np.rint(np.float32(8) * low * inverse).clip(-128, 127).astype(np.int8)
    base = lows.astype(np.float32) / 8 * wide
    if not (np.abs(base) <= np.finfo(np.float16).max).all():
        raise ValueError("values: beyond what half floats hold")
    scaled = (grouped - base[..., None]) * inverse[..., None]
    codes = np.rint(np.clip(scaled, 0, 15)).astype(np.uint8)
    packed = codes[..., :16] | codes[..., 16:] << 4
    scales = np.stack([step.astype(np.uint8), lows.view(np.uint8)], 1).transpose(0, 1, 3, 2)
    return packed.reshape(heads, tokens, dim // 2), np.ascontiguousarray(scales)


def dequantise(plane: Plane) -> Floats:
    """float32 [heads, tokens, dim]."""
    data, scales = plane.data, plane.scales
    if plane.format == "int8" and scales is not None:
        return np.asarray(data.astype(np.float32) * scales[..., None], np.float32)
    if plane.format == "int4" and scales is not None:
        heads, tokens, half = data.shape
        packed = data.reshape(heads, tokens, half * 2 // _GROUP, _GROUP // 2)
        codes = np.concatenate([packed & 15, packed >> 4], 3).astype(np.float32)
        steps, lows = scales.transpose(1, 0, 3, 2)[..., None]
        step = _steps(steps)
        low = lows.view(np.int8).astype(np.float32) / 8 * step
        return np.asarray(low + codes * step, np.float32).reshape(heads, tokens, half * 2)
    return widen(data, plane.format)


def merge(o: Floats, lse: Floats) -> tuple[Floats, Floats]:
    """o [Hq, S, D] and lse [Hq, S] out of those of disjoint rows, [n, Hq, S, D] and [n, Hq, S]."""
    top = lse.max(0)
    top = np.where(top == -np.inf, np.float32(0), top)
    weights = np.exp(lse - top)
    total = weights.sum(0)
    share = weights / np.where(total == 0, np.float32(1), total)
    with np.errstate(divide="ignore"):
        return np.asarray((share[..., None] * o).sum(0), np.float32), np.asarray(np.log(total) + top, np.float32)


def attend(
    q: Floats,
    parts: Sequence[Part],
    positions: NDArray[np.int64] | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Floats, Floats]:
    """o [Hq, S, D] and lse [Hq, S]; arguments are those of `ctxreuse.kernels.attention.attend`, checked."""
    heads, queries, dim = q.shape
    scores, values = [np.empty((heads, queries, 0))], [np.empty((heads, 0, dim))]
    for part in parts:
        last = part.k.tokens if part.last is None else part.last
        if last == part.first:
            continue
        group = heads // part.k.data.shape[0]
        k, v = (
            dequantise(plane.rows(part.first, last)).astype(np.float64).repeat(group, 0) for plane in (part.k, part.v)
        )
        with np.errstate(invalid="ignore", over="ignore"):
            s = (q if part.q is None else part.q).astype(np.float64) @ k.swapaxes(1, 2) * scale
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        scores.append(np.where(_seen(part, last, positions, window, queries), s, -np.inf))
        values.append(v)
    s, v = np.concatenate(scores, 2), np.concatenate(values, 1)
    top = s.max(2, initial=-np.inf, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.exp(s - np.where(top == -np.inf, 0, top))
        total = weights.sum(2, keepdims=True)
        # Rows that nobody sees are not touched: what they hold (not a number, maybe) must not reach the sum.
        seen = (weights > 0).any((0, 1))
        o = (weights[..., seen] @ v[:, seen]) / np.where(total > 0, total, 1)
        lse = np.log(total) + np.where(top == -np.inf, 0, top)
    return o.astype(np.float32), lse[..., 0].astype(np.float32)


def _seen(
    part: Part, last: int, positions: NDArray[np.int64] | None, window: int | None, queries: int
) -> NDArray[np.bool_]:
    """[S, rows]."""
    seen = np.ones((queries, last - part.first), np.bool_)
    if part.at is not None and positions is not None:
        at = part.at[part.first : last] if isinstance(part.at, np.ndarray) else part.at + np.arange(part.first, last)
        seen &= at <= positions[:, None]
        if window is not None:
            seen &= at > positions[:, None] - window
    if part.hidden is not None:
        hidden = part.hidden[(part.hidden >= part.first) & (part.hidden < last)]
        seen[:, hidden - part.first] = False
    return seen
