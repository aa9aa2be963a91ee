"""Parts of K and V as the attention kernels read them: who sees which rows, and how rows are shared among blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from ctxreuse.kernels.attention import GROUP, Plane

__all__ = ["ITEM", "PLANE", "RUN", "bits_of", "plane_record", "seen_rows", "shared_out", "spans", "without"]

_U8, _I8, _U4, _I4 = "<u8", "<i8", "<u4", "<i4"
PLANE: Final = np.dtype(
    [
        ("data", _U8),
        ("scales", _U8),
        *((name, _I8) for name in ("head", "scale_head", "scale_low", "scale_group")),
        *((name, _U4) for name in ("row", "format")),
    ]
)
"""AttendPlane of `native/cuda/attend.cuh`."""
RUN: Final = np.dtype(
    [("k", PLANE), ("v", PLANE)]
    + [(name, _U8) for name in ("cosine", "sine", "hidden", "seen")]
    + [(name, _I4) for name in ("first", "last", "clear_first", "clear_last")]
    + [("angles", _U4), ("interleaved", _U4)]
)
"""AttendRun."""
ITEM: Final = np.dtype([("run", _U4), ("runs", _U4)])
"""AttendItem."""
_FORMATS: Final = {"fp16": (1, np.float16), "bf16": (2, np.uint16), "int8": (3, np.int8), "int4": (4, np.uint8)}
_WARPS: Final = 8
_STRETCH: Final = 64  # hidden rows that are worth a new run to leave out


def plane_record(plane: Plane, xp: Any, address: Any, what: str) -> np.void:
    """PLANE of a plane in the device's memory. ValueError for formats, types, steps and places that kernels cannot."""
    data, scales = plane.data, plane.scales
    if plane.format not in _FORMATS:
        raise ValueError(f"{what}: the device reads {', '.join(_FORMATS)}, not {plane.format!r}")
    code, stored = _FORMATS[plane.format]
    if not isinstance(data, xp.ndarray) or data.dtype != stored or data.ndim != 3:
        raise ValueError(f"{what}: {plane.format} needs {np.dtype(stored)} [heads, tokens, dim] on the device")
    head, row, item = data.strides
    if item != data.itemsize or row < 0 or head % 16 or row % 16 or row >= 1 << 32 or address(data) % 16:
        raise ValueError(f"{what}: dim must be contiguous, and rows begin at multiples of 16 bytes")
    out = np.zeros((), PLANE)
    out["data"], out["head"], out["row"], out["format"] = address(data), head, row, code
    wanted: tuple[int, ...] | None = None
    if plane.format == "int8":
        wanted = data.shape[:2]
    elif plane.format == "int4":
        wanted = (data.shape[0], 2, plane.dim // GROUP, data.shape[1])
    if wanted is None:
        return cast(np.void, out[()])
    kind = np.dtype(np.float32 if plane.format == "int8" else np.uint8)
    if not isinstance(scales, xp.ndarray) or scales.dtype != kind or scales.shape != wanted:
        raise ValueError(f"{what}: {plane.format} needs scales {kind} {wanted} on the device")
    *steps, last = (stride // kind.itemsize for stride in scales.strides)
    if scales.shape[-1] > 1 and last != 1:
        raise ValueError(f"{what}: scales of neighbouring tokens must be neighbours")
    out["scales"], out["scale_head"] = address(scales), steps[0]
    if plane.format == "int4":
        out["scale_low"], out["scale_group"] = steps[1:]
    return cast(np.void, out[()])


def seen_rows(
    first: int,
    last: int,
    at: int | npt.NDArray[np.int64] | None,
    positions: npt.NDArray[np.int64],
    window: int | None,
) -> npt.NDArray[np.int32] | None:
    """The rows low <= row < high that each query sees, int32 [queries, 2]; None if all see all."""
    if at is None:
        return None
    reach = np.full_like(positions, np.iinfo(np.int64).min) if window is None else positions - window
    if isinstance(at, np.ndarray):
        own = at[first:last]
        low, high = np.searchsorted(own, reach, "right") + first, np.searchsorted(own, positions, "right") + first
    else:
        low = np.full_like(positions, first) if window is None else reach + 1 - at
        high = positions + 1 - at
    seen = np.stack([low, high], 1).clip(first, last).astype(np.int32)
    return None if (seen == (first, last)).all() else seen


def spans(first: int, last: int, seen: npt.NDArray[np.int32] | None) -> list[tuple[int, int]]:
    """Runs of rows that some query sees, ascending and apart."""
    wanted = [(first, last)] if seen is None else sorted((int(a), int(b)) for a, b in seen)
    out: list[tuple[int, int]] = []
    for low, high in wanted:
        if low >= high:
            continue
        if out and low <= out[-1][1]:
            out[-1] = out[-1][0], max(high, out[-1][1])
        else:
            out.append((low, high))
    return out


def without(span: tuple[int, int], hidden: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """The parts of a span between long stretches of hidden rows; neither their first row nor their last is hidden."""
    rows = np.setdiff1d(np.arange(*span), hidden, assume_unique=False)
    if not rows.size:
        return []
    breaks = np.flatnonzero(np.diff(rows) > _STRETCH)
    firsts, lasts = rows[np.append(0, breaks + 1)], rows[np.append(breaks, rows.size - 1)]
    return [(int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]


def bits_of(hidden: npt.NDArray[np.int64], tokens: int) -> npt.NDArray[np.uint32]:
    """Bit t % 32 of word t / 32: row t is hidden."""
    flags = np.zeros(-(-tokens // 32) * 32, np.uint8)
    flags[hidden[(hidden >= 0) & (hidden < tokens)]] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


def shared_out(
    runs: Sequence[tuple[int, int]], tile: int, shares: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Cut runs (first, last) into about ``shares`` equal ones: pieces (run, first, last), and (piece, pieces) a share.

    Tiles begin at multiples of ``tile`` rows and are not cut; a share has whole rounds of eight of them, one a warp.
    """
    counts = [-(-last // tile) - first // tile for first, last in runs]
    each = -(-sum(counts) // max(1, shares))
    each = -(-each // _WARPS) * _WARPS
    pieces: list[tuple[int, int, int]] = []
    items: list[tuple[int, int]] = []
    room, begun = each, 0
    for number, ((first, last), count) in enumerate(zip(runs, counts, strict=True)):
        done = 0
        while done < count:
            taken = min(room, count - done)
            begin = (first // tile + done) * tile
            pieces.append((number, max(first, begin), min(last, begin + taken * tile)))
            done, room = done + taken, room - taken
            if not room:
                items.append((begun, len(pieces) - begun))
                room, begun = each, len(pieces)
    if begun < len(pieces):
        items.append((begun, len(pieces) - begun))
    return pieces, items
