"""Attention of a device compared with float64 on the CPU, on any Launcher: a GPU, or the shim on this processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.cuda import Launcher
from ctxreuse.cuda.attention import ChunkAttention, DevicePart, plane_on
from ctxreuse.cuda.copies import on_host
from ctxreuse.kernels.attention import Attended, Part, quantise
from ctxreuse.rope import Rotary, RotaryStyle, Rotation, inverse_frequencies
from oracle.kernels.attention import attend as reference

__all__ = ["Chunk", "compare_attention", "parts_of", "turned"]

Floats = npt.NDArray[np.float32]


class Chunk(NamedTuple):
    """A part to make: ``tokens`` random rows in these formats; the rest as of `Part`. ``shift``: positions to turn."""

    tokens: int
    k: str = "int8"
    v: str = ""
    first: int = 0
    last: int | None = None
    at: int | npt.NDArray[np.int64] | None = None
    hidden: npt.NDArray[np.int64] | None = None
    shift: int = 0
    interleaved: bool = False
    rotary: float = 1.0


def turned(q: Floats, turn: Rotation) -> Floats:
    """q [..., D] turned in numpy."""
    n = len(turn.cos)
    out = q.copy()
    one, two = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if turn.interleaved else (slice(0, n), slice(n, 2 * n))
    out[..., one] = q[..., one] * turn.cos - q[..., two] * turn.sin
    out[..., two] = q[..., two] * turn.cos + q[..., one] * turn.sin
    return out


def parts_of(
    launcher: Launcher, q: Floats, chunks: Sequence[Chunk], heads: int, random: np.random.Generator
) -> tuple[list[DevicePart], list[Part]]:
    """The same parts for the device and for the CPU."""
    there, here = [], []
    for chunk in chunks:
        shape = (heads, chunk.tokens, q.shape[2])
        k = quantise(random.standard_normal(shape, np.float32), chunk.k)
        v = quantise(random.standard_normal(shape, np.float32) + np.float32(0.3), chunk.v or chunk.k)
        turn, own = None, None
        if chunk.shift:
            width = int(q.shape[2] * chunk.rotary)
            style: RotaryStyle = "pairs" if chunk.interleaved else "half"
            turn = Rotary(style, tuple(inverse_frequencies(1e4, width).tolist())).shift(chunk.shift)
            own = turned(q, turn)
        of = (chunk.first, chunk.last, chunk.at)
        there.append(DevicePart(plane_on(launcher, k), plane_on(launcher, v), *of, turn, chunk.hidden))
        here.append(Part(k, v, *of, own, chunk.hidden))
    return there, here


def compare_attention(
    launcher: Launcher,
    chunks: Sequence[Chunk],
    shape: tuple[int, int, int],
    heads: int = 1,
    *,
    seed: int = 0,
    positions: npt.ArrayLike | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dtype: npt.DTypeLike = np.float32,
) -> Attended:
    """Attend on the device and on the CPU; AssertionError where they differ by more than 1e-3 of the largest value.

    Returns what the device gave, on the host.
    """
    random = np.random.default_rng(seed)
    q = 2 * random.standard_normal(shape, np.float32)
    items: npt.NDArray[Any] = q.astype(dtype)
    if np.dtype(dtype) == np.uint16:
        items = (q.view(np.uint32) >> 16).astype(np.uint16)
        q = (items.astype(np.uint32) << 16).view(np.float32)
    else:
        q = items.astype(np.float32)
    there, here = parts_of(launcher, q, chunks, heads, random)
    options: dict[str, Any] = {"positions": positions, "window": window, "softcap": softcap}
    made = ChunkAttention(launcher, there, shape, **options)(launcher.xp.asarray(items))
    got = Attended(on_host(made.o), on_host(made.lse))
    where = None if positions is None else np.asarray(positions, np.int64)
    o, lse = reference(q, here, where, float(shape[2]) ** -0.5, window, softcap)
    seen = np.isfinite(lse)
    assert (np.isfinite(got.lse) == seen).all(), "who sees anything"
    assert np.isfinite(got.o).all(), "a result that is no number"
    assert np.abs(got.o - o).max(initial=0) <= 1e-3 * np.abs(o).max(initial=0), "values"
    assert np.abs(got.lse[seen] - lse[seen]).max(initial=0) <= 1e-3, "logarithms of sums"
    return got
