"""Attention over runs of K and V that stay as they are stored: fp32, fp16, bf16, or quantised to 8 or 4 bits.

A `Plane` is K or V of a layer, [heads, tokens, dim] with dim contiguous, any steps between heads and between tokens, in
any memory (numpy, a memory map, a torch tensor through `.numpy()`). Its numbers, by format:

  fp32, fp16, bf16  values as they are; bf16 as uint16 bits. No scales.
  int8   int8 codes; x = code * scale. `scales` float32 [heads, tokens]: symmetric, one a row; -128 is not used.
  int4   uint8 [heads, tokens, dim / 2]; x = low + code * step, codes 0..15, by groups of 32 neighbours along dim (dim
         must be a multiple of 32): byte i of a group's 16 holds value i in its low four bits and value i + 16 in its
         high ones. `scales` uint8 [heads, 2, dim / 32, tokens]: steps, the upper bits of half floats without their
         sign (5 of exponent, 3 of mantissa), then lows, signed, in eighths of the step. Tokens stand last, so that a
         register of scales is one load. 4.5 bits a value; codes are chosen against the rounded numbers, so that
         rounding these costs almost no accuracy (SmolLM2, KL of five kinds of text: .0073 with half floats, .0075).

A `Part` is one run of rows of a K and a V plane (the formats may differ; several parts may be cut from one plane), seen
by every query, or by position. `attend` gives the softmax over all rows of all parts: each K and V row is read once for
all query heads of its group, is never decompressed to memory, and partial results are merged by log-sum-exp. Where K is
stored un-rotated, or rotated to other positions than its rows have now, turn the *query* for that part (`Part.q`).

Numbers. `lse` is the natural logarithm of the sum of exp(score). Arithmetic is fp32; on processors with dot products of
bytes, int8 and int4 parts take queries and weights rounded to 16 bits of their largest; with ``rounded``, those with
products of bf16 take both rounded to that over bf16 parts, which is twice as fast for many queries. Against float64
over the same codes: 1e-5 of the largest value for float parts, 3e-4 for quantised ones, 1e-2 where ``rounded``. Tables
do not give the same bits. A query that sees no row has o = 0 and lse = -inf. Rows or queries that are not finite give
results that are not.

Threads. Any thread may call anything; the interpreter lock is released while the kernels run, and arrays must not be
changed until the call returns; nothing keeps a buffer. Above `PARALLEL_VALUES` a call uses the kernels' threads.

Errors. ValueError: shapes, types, formats, steps, positions that do not ascend, rows outside of their planes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctxreuse.dtypes import KERNEL_NAMES, VALUES
from ctxreuse.kernels.convert import from_float32, to_float32
from ctxreuse.kernels.dispatch import native
from ctxreuse.kernels.threads import cores, spread

__all__ = [
    "FORMATS",
    "GROUP",
    "MOST_DIM",
    "PARALLEL_VALUES",
    "Attended",
    "Part",
    "Plane",
    "attend",
    "attend_name",
    "dequantise",
    "merge",
    "quantise",
]

Floats = NDArray[np.float32]

FORMATS: Final = ("fp32", "fp16", "bf16", "int8", "int4")
"""What a plane may hold."""
GROUP: Final = 32
"""Neighbours along dim that share an int4 step and low."""
PARALLEL_VALUES: Final = 1 << 24
"""Products (query rows times K and V values) from which one call uses several threads: half a millisecond of int8."""
#: Queries of all heads, for each thread, from which on they are shared out rather than the rows.
_QUERIES: Final = 32
_STORED: Final = {KERNEL_NAMES[name]: kind for name, kind in VALUES.items()} | {"int8": np.int8, "int4": np.uint8}
_SCALES: Final = {"int8": np.float32, "int4": np.uint8}
_FLOATS: Final = {np.dtype(kind): KERNEL_NAMES[name] for name, kind in VALUES.items()}
MOST_DIM: Final = 512
"""Most values of a row."""


def attend_name(dim: int) -> str:
    """Return the implementation for rows of so many values: `kernels.active()`, or another where that has none."""
    return native.attend_name(dim)


class Plane(NamedTuple):
    """K or V of one layer; see the module's text for the layout of ``data`` and ``scales`` by ``format``."""

    format: str
    data: NDArray[Any]
    scales: NDArray[Any] | None = None

    @property
    def dim(self) -> int:
        """Values of a row."""
        return int(self.data.shape[2]) * (2 if self.format == "int4" else 1)

    @property
    def tokens(self) -> int:
        """Rows a head."""
        return int(self.data.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def on_host(self) -> Plane:
        """The plane, copied to the host's memory if a device has it."""
        data: Any = self.data
        scales: Any = self.scales
        if isinstance(data, np.ndarray):
            return self
        return Plane(self.format, data.get(), None if scales is None else scales.get())

    def rows(self, first: int, last: int) -> Plane:
        """Rows first..last of it as a view."""
        scales = None if self.scales is None else self.scales[..., first:last]
        return Plane(self.format, self.data[:, first:last], scales)


class Part(NamedTuple):
    """Rows ``first``..``last`` (None: to the end) of two planes with the same heads, tokens and dim.

    ``at``: None, and every query sees every row; or the position of row 0 (row r has position ``at`` + r); or int64
    [tokens], one a row, ascending between first and last. A query at position x sees the rows at positions
    x - window < p <= x. ``q``: float32 [Hq, S, D], the queries as rotated for this part (None: those of the call).
    ``hidden``: ascending indices of rows that are masked out (they were recomputed and are in another part).
    """

    k: Plane
    v: Plane
    first: int = 0
    last: int | None = None
    at: int | NDArray[np.int64] | None = None
    q: Floats | None = None
    hidden: NDArray[np.int64] | None = None


class Attended(NamedTuple):
    """``o`` float32 [Hq, S, D] and ``lse`` float32 [Hq, S], natural logarithm; -inf where no row was seen."""

    o: Floats
    lse: Floats


def attend(
    q: Floats,
    parts: Sequence[Part],
    *,
    positions: ArrayLike | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    threads: int | None = None,
    rounded: bool = False,
) -> Attended:
    """softmax(scale * q K^T) V over all rows of all parts that each query sees.

    ``q`` float32 [Hq, S, D]; query head h reads K and V head h // (Hq / Hkv). ``positions``: int64 [S], those of the
    queries in any order; needed if a part has ``at``. ``scale``: 1 / sqrt(D) if None. ``window``: a query sees that
    many positions, its own included (None: all below). ``softcap``: c * tanh(score / c), as Gemma 2 has. ``threads``:
    at most; None for as many as it pays to use. ``rounded``: over bf16 rows, queries and weights may become bf16.
    """
    q = np.ascontiguousarray(q)
    where = None if positions is None else _whole(positions, "positions")
    _check(q, where, window, softcap)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    if not parts:
        return Attended(np.zeros_like(q), np.full(q.shape[:2], -np.inf, np.float32))
    numbers = scale, window or 0, softcap or 0.0, rounded
    fields = [_fields(part, q) for part in parts]
    rows = sum(part[8] - part[7] for part in fields)
    if threads is None:
        threads = cores() if 2 * q.size * rows > PARALLEL_VALUES else 1
    return _native(q, fields, where, numbers, max(1, min(threads, rows)))


def _native(
    q: Floats,
    parts: list[tuple[Any, ...]],
    positions: NDArray[np.int64] | None,
    numbers: tuple[float, int, float, bool],
    threads: int,
) -> Attended:
    query_heads, queries, dim = q.shape
    heads = parts[0][1].shape[0]
    rows = sum(part[8] - part[7] for part in parts)
    # Heads and queries are shared out within the call; few of them have the rows shared out instead.
    shares = 1 if heads % threads == 0 or query_heads * queries >= _QUERIES * threads else threads
    o = np.empty((shares, *q.shape), np.float32)
    lse = np.empty((shares, query_heads, queries), np.float32)

    def run(i: int) -> None:
        some = rows * i // shares, rows * (i + 1) // shares
        native.attend(
            q, o[i], lse[i], query_heads, heads, queries, dim, positions, *numbers, parts, 0, heads, *some,
            threads if shares == 1 else 1,
        )  # fmt: skip

    spread(run, shares)
    if shares > 1:
        native.attend_merge(o, lse, shares, query_heads * queries, dim)
    return Attended(o[0], lse[0])


def _fields(part: Part, q: Floats) -> tuple[Any, ...]:
    """A part as the extension reads it. It checks shapes and steps itself, but sees no types."""
    k, v, at, hidden = part.k, part.v, part.at, part.hidden
    for plane in (k, v):
        scales = plane.scales
        if (
            plane.data.dtype != _STORED.get(plane.format)
            or plane.data.ndim != 3
            or (scales is None) != (plane.format not in _SCALES)
            or (scales is not None and scales.dtype != _SCALES[plane.format])
        ):
            _check_plane(plane, "plane")
    if v.data.shape[:2] != k.data.shape[:2] or not (
        part.q is None or (part.q.dtype, part.q.shape) == (q.dtype, q.shape)
    ):
        raise ValueError(
            f"part: k {k.data.shape}, v {v.data.shape}, q {None if part.q is None else part.q.shape} differ"
        )
    if not (hidden is None or hidden.dtype == np.int64) or (isinstance(at, np.ndarray) and at.dtype != np.int64):
        raise ValueError("part: at and hidden need int64")
    tokens = k.data.shape[1]
    return (
        FORMATS.index(k.format), k.data, k.scales, FORMATS.index(v.format), v.data, v.scales, tokens, part.first,
        tokens if part.last is None else part.last, at if at is None or isinstance(at, np.ndarray) else int(at),
        None if part.q is None else np.ascontiguousarray(part.q), hidden,
    )  # fmt: skip


def _whole(numbers: ArrayLike, what: str) -> NDArray[np.int64]:
    found = np.asarray(numbers)
    if found.size and found.dtype.kind not in "iu":
        raise ValueError(f"{what}: need whole numbers, got {found.dtype}")
    return np.ascontiguousarray(found, np.int64)


def merge(partials: Sequence[Attended]) -> Attended:
    """One result out of those over disjoint sets of rows, in any order: other devices, other calls."""
    if not partials:
        raise ValueError("merge: needs at least one partial result")
    o, lse = np.stack([p.o for p in partials]), np.stack([p.lse for p in partials])
    if o.dtype != np.float32 or lse.dtype != np.float32 or o.ndim != 4 or lse.shape != o.shape[:3]:
        raise ValueError(f"merge: needs float32 o [Hq, S, D] and lse [Hq, S], got {o.dtype} {o.shape}, {lse.shape}")
    native.attend_merge(o, lse, len(partials), o.shape[1] * o.shape[2], o.shape[3])
    return Attended(o[0], lse[0])


def quantise(x: NDArray[Any], format: str) -> Plane:
    """A plane of ``format`` from values [heads, tokens, dim]: float32, float16, or bfloat16 as uint16 bits.

    Floats of the same type are taken as they are, without a copy; other float formats are rounded to nearest even.
    ValueError for values that are not finite (int8, int4), or beyond what half floats hold (int4).
    """
    of = _FLOATS.get(x.dtype)
    if of is None or x.ndim != 3:
        raise ValueError(
            f"values: need float32, float16 or (bf16) uint16 [heads, tokens, dim], got {x.dtype} {x.shape}"
        )
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is unknown; use one of {', '.join(FORMATS)}")
    if format == of:
        return Plane(format, x)
    if format not in _SCALES:
        return Plane(format, from_float32(to_float32(x, of), format).view(_STORED[format]))
    heads, tokens, dim = x.shape
    if format == "int4" and dim % GROUP:
        raise ValueError(f"int4 needs dim in groups of {GROUP}, got {dim}")
    shape = (heads, tokens) if format == "int8" else (heads, 2, dim // GROUP, tokens)
    codes = np.empty((heads, tokens, dim if format == "int8" else dim // 2), _STORED[format])
    scales = np.empty(shape, _SCALES[format])
    if x.strides[2] != x.itemsize or min(x.strides) < 0:
        x = np.ascontiguousarray(x)
    native.attend_quantise(x, FORMATS.index(of), FORMATS.index(format), codes, scales)
    return Plane(format, codes, scales)


def dequantise(plane: Plane) -> Floats:
    """float32 [heads, tokens, dim] of a plane: what `attend` takes its rows for."""
    _check_plane(plane, "plane")
    data, scales = plane.data, plane.scales
    if plane.format == "int8" and scales is not None:
        return np.asarray(data.astype(np.float32) * scales[..., None], np.float32)
    if plane.format == "int4" and scales is not None:
        heads, tokens, half = data.shape
        packed = data.reshape(heads, tokens, half * 2 // GROUP, GROUP // 2)
        codes = np.concatenate([packed & 15, packed >> 4], 3).astype(np.float32)
        step, low = _int4_scales(scales)
        return np.asarray(low + codes * step, np.float32).reshape(heads, tokens, half * 2)
    return to_float32(data, plane.format)


def _int4_scales(scales: NDArray[np.uint8]) -> tuple[Floats, Floats]:
    """Steps and lows, each float32 [heads, tokens, groups, 1], of a plane's ``scales``."""
    codes, lows = scales.transpose(1, 0, 3, 2)[..., None]
    step = (codes.astype(np.uint16) << 7).view(np.float16).astype(np.float32)
    return step, lows.astype(np.int8).astype(np.float32) * (np.float32(0.125) * step)


def _check(q: Floats, positions: NDArray[np.int64] | None, window: int | None, softcap: float | None) -> None:
    if q.ndim != 3 or q.dtype != np.float32 or not 1 <= q.shape[2] <= MOST_DIM:
        raise ValueError(f"q: needs float32 [heads, queries, dim of 1 to {MOST_DIM}], got {q.dtype} {q.shape}")
    if positions is not None and positions.shape != (q.shape[1],):
        raise ValueError(f"positions: {positions.shape} for {q.shape[1]} queries")
    if window is not None and window < 1:
        raise ValueError(f"window: {window} is not positive")
    if softcap is not None and not (0 < softcap < math.inf):
        raise ValueError(f"softcap: {softcap} is not a positive number")


def _check_plane(plane: Plane, what: str) -> None:
    data, scales = plane.data, plane.scales
    stored = _STORED.get(plane.format)
    if stored is None:
        raise ValueError(f"{what}: format {plane.format!r} is unknown; use one of {', '.join(FORMATS)}")
    if data.ndim != 3 or data.dtype != stored or (data.shape[2] > 1 and data.strides[2] != data.itemsize):
        raise ValueError(f"{what}: {plane.format} needs {np.dtype(stored)} [heads, tokens, dim], dim contiguous")
    if plane.format == "int4" and plane.dim % GROUP:
        raise ValueError(f"{what}: int4 needs dim in groups of {GROUP}, got {plane.dim}")
    wanted: tuple[int, ...] | None = None
    if plane.format == "int8":
        wanted = data.shape[:2]
    elif plane.format == "int4":
        wanted = (data.shape[0], 2, plane.dim // GROUP, data.shape[1])
    if (None if scales is None else scales.shape) != wanted:
        raise ValueError(f"{what}: {plane.format} needs scales {wanted}")
    if scales is not None and scales.dtype != _SCALES[plane.format]:
        raise ValueError(f"{what}: {plane.format} needs scales of {_SCALES[plane.format].__name__}, got {scales.dtype}")
