"""rANS streams on a device: `ctxreuse.kernels.rans_*_many` for arrays in its memory, the same bytes and symbols.

One warp codes one stream, so thousands of streams fill a device; a few do not. Arrays may come from any library that
speaks DLPack, such as torch; results are arrays of the launcher's module (cupy). Calls queue work on the current stream
and wait for it, because the streams' status must be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ctxreuse.cuda.launch import Launcher
from ctxreuse.errors import FormatError
from ctxreuse.kernels import RansTables

__all__ = ["CODE", "STREAM", "TABLE", "as_device", "codes_of", "count", "decode", "encode", "tables_of"]

STREAM: Final = np.dtype([("data", "<u8"), ("symbols", "<u8"), ("steps", "<u8"), ("bytes", "<u4"), ("n", "<u4")])
TABLE: Final = np.dtype([("slot", "<u4", 256)])
CODE: Final = np.dtype([("span", "<u4", 32), ("reciprocal", "<u4", 32)])
"""struct RansStream, RansTable and RansCode of the kernels' text."""

_WARPS, _WARP, _RING = 4, 32, 512
_OK, _CORRUPT, _SYMBOL, _TABLE = range(4)
_CENTRE = 15
_LONGEST: Final = 0xFFFFFFFF - 512


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


def as_device(launcher: Launcher, array: Any, dtype: npt.DTypeLike, what: str) -> Any:
    """A contiguous flat array in the device's memory: what is there already is not copied.

    ValueError for another element type. An array of another library on the device is taken by DLPack.
    """
    xp = launcher.xp
    if not isinstance(array, np.ndarray | xp.ndarray) and hasattr(array, "__dlpack__"):
        array = xp.from_dlpack(array)
    if not isinstance(array, np.ndarray | xp.ndarray):
        array = np.frombuffer(array, np.uint8)
    if array.dtype != np.dtype(dtype):
        raise ValueError(f"{what}: needs {np.dtype(dtype)}, got {array.dtype}")
    return xp.ascontiguousarray(xp.asarray(array)).reshape(-1)


def _laid_out(counts: npt.ArrayLike, table_of_step: Any, launcher: Launcher) -> tuple[npt.NDArray[np.void], int, Any]:
    lengths = np.ascontiguousarray(counts, np.int64)
    if lengths.ndim != 1 or (lengths < 0).any() or (lengths > _LONGEST).any():
        raise ValueError("counts: needs the number of symbols of each stream, below 2^32")
    each = -(-lengths // 64)
    steps = as_device(launcher, table_of_step, np.uint16, "table_of_step")
    streams = np.zeros(len(lengths), STREAM)
    streams["n"] = lengths
    streams["symbols"] = np.cumsum(lengths) - lengths
    if steps.size == each.sum():
        streams["steps"] = np.cumsum(each) - each
    elif not (len(lengths) and (lengths == lengths[0]).all() and steps.size == each[0]):
        raise ValueError(f"table_of_step: {each.sum()} steps of 64 symbols, got {steps.size} numbers")
    return streams, int(lengths.sum()), steps


def _blocks(streams: int) -> int:
    return -(-streams // _WARPS)


def decode(
    launcher: Launcher, data: Any, offsets: npt.ArrayLike, counts: npt.ArrayLike, tables: RansTables, table_of_step: Any
) -> tuple[Any, Any]:
    """Decode many streams: symbols uint8 [sum(counts)] and seeds uint16 [streams, 64], both on the device.

    ``data`` uint8, stream i at offsets[i] : offsets[i + 1]; ``table_of_step`` uint16 as for rans_decode_many.
    FormatError names the first corrupt stream; ValueError for sizes and for a step without table.
    """
    xp = launcher.xp
    of = as_device(launcher, data, np.uint8, "data")
    streams, total, steps = _laid_out(counts, table_of_step, launcher)
    places = np.ascontiguousarray(offsets, np.int64)
    lengths = np.diff(places)
    if places.shape != (len(streams) + 1,) or (places < 0).any() or (lengths < 0).any() or (places > of.size).any():
        raise ValueError(f"offsets: {len(streams)} streams within {of.size} bytes need {len(streams) + 1}, ascending")
    if (lengths > _LONGEST).any():
        raise ValueError("offsets: a stream is longer than 2^32 bytes")
    streams["data"], streams["bytes"] = places[:-1], lengths
    symbols = xp.empty(total, np.uint8)
    seeds = xp.zeros((len(streams), 64), np.uint16)
    status = xp.zeros(len(streams), np.uint32)
    shared = len(tables) * TABLE.itemsize + _WARPS * _RING
    _fits(launcher, shared, tables)
    arguments = (
        of,
        xp.asarray(streams.view(np.uint8)),
        np.uint32(len(streams)),
        xp.asarray(tables_of(tables.freqs).view(np.uint8)),
        np.uint32(len(tables)),
        steps,
        symbols,
        seeds,
        status,
    )
    launcher.launch("ctx_rans_decode", _blocks(len(streams)), _WARPS * _WARP, shared, arguments)
    _complain(status)
    return symbols, seeds


def encode(
    launcher: Launcher, symbols: Any, counts: npt.ArrayLike, tables: RansTables, table_of_step: Any, seeds: Any = None
) -> tuple[Any, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Encode many streams; ``seeds`` uint16 [streams, 64], default 0. The bytes stay on the device, with gaps.

    Returns data uint8, where each stream starts in it and how many bytes it has (int64 [streams], on the host).
    ValueError for sizes, a step without table, a symbol without frequency.
    """
    xp = launcher.xp
    of = as_device(launcher, symbols, np.uint8, "symbols")
    streams, total, steps = _laid_out(counts, table_of_step, launcher)
    if of.size != total:
        raise ValueError(f"symbols: needs {total}, got {of.size}")
    if seeds is None:
        first = xp.zeros(64 * len(streams), np.uint16)
    else:
        first = as_device(launcher, seeds, np.uint16, "seeds")
    if first.size != 64 * len(streams):
        raise ValueError(f"seeds: needs 64 for each of {len(streams)} streams")
    rooms = (256 + streams["n"].astype(np.int64) + 3) // 4 * 4
    ends = np.cumsum(rooms)
    streams["data"] = ends - rooms
    data = xp.empty(int(rooms.sum()), np.uint8)
    listed = xp.asarray(streams.view(np.uint8))
    status = xp.zeros(len(streams), np.uint32)
    shared = len(tables) * CODE.itemsize
    _fits(launcher, shared, tables)
    arguments = (
        data,
        listed,
        np.uint32(len(streams)),
        xp.asarray(codes_of(tables.freqs).view(np.uint8)),
        np.uint32(len(tables)),
        steps,
        of,
        first,
        status,
    )
    launcher.launch("ctx_rans_encode", _blocks(len(streams)), _WARPS * _WARP, shared, arguments)
    _complain(status)
    sizes = on_host(listed).view(STREAM)["bytes"].astype(np.int64)
    return data, ends - sizes, sizes


def count(launcher: Launcher, symbols: Any, table_of_step: Any, tables: int) -> Any:
    """Count each symbol by table, uint32 [tables, 32] on the device, as rans_count.

    ValueError for a symbol of 32 or more and for a step without table.
    """
    xp = launcher.xp
    of = as_device(launcher, symbols, np.uint8, "symbols")
    steps = as_device(launcher, table_of_step, np.uint16, "table_of_step")
    if steps.size != -(-of.size // 64):
        raise ValueError(f"table_of_step: {-(-of.size // 64)} steps of 64 symbols, got {steps.size} numbers")
    counts, bad = xp.zeros((tables, 32), np.uint32), xp.zeros(1, np.uint32)
    each = 64
    arguments = (of, np.uint64(of.size), steps, np.uint32(tables), np.uint32(each), counts, bad)
    launcher.launch("ctx_rans_count", -(-steps.size // (each * _WARPS)), _WARPS * _WARP, 0, arguments)
    if int(bad[0]):
        raise ValueError("symbols: one is 32 or more, or a step names no table")
    return counts


def on_host(array: Any) -> npt.NDArray[Any]:
    """A copy in the host's memory, waiting for what is queued."""
    return np.asarray(array if isinstance(array, np.ndarray) else array.get())


def to_host(launcher: Launcher, array: Any) -> npt.NDArray[Any]:
    """As `on_host`, into memory that the device writes at full speed, for what is large."""
    out: npt.NDArray[Any] = launcher.host(array.nbytes).view(array.dtype).reshape(array.shape)
    if isinstance(array, np.ndarray):
        out[...] = array
    else:
        array.get(out=out)
    return out


def to_device(launcher: Launcher, arrays: Sequence[npt.NDArray[Any]], kept: list[Any]) -> Any:
    """The bytes of arrays one after the other, uint8 in the device's memory.

    The copy is queued: ``kept`` gets what must live until it is done.
    """
    parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    staged = launcher.host(sum(part.size for part in parts))
    np.concatenate(parts, out=staged)
    out = launcher.xp.empty(staged.size, np.uint8)
    kept += [staged, out]
    if isinstance(out, np.ndarray):
        out[...] = staged
    else:
        out.set(staged)
    return out


def _fits(launcher: Launcher, shared: int, tables: RansTables) -> None:
    if shared > launcher.shared_bytes:
        raise ValueError(f"tables: {len(tables)} do not fit into {launcher.shared_bytes} bytes of shared memory")


def _complain(status: Any) -> None:
    ended = on_host(status)
    bad = np.flatnonzero(ended)
    if not bad.size:
        return
    first, how = int(bad[0]), int(ended[bad[0]])
    if how == _CORRUPT:
        raise FormatError("bytes are no rANS stream of these tables and this length", where=f"stream {first}")
    what = "symbols: one has no frequency" if how == _SYMBOL else "table_of_step: names a table that is not there"
    raise ValueError(f"{what} (stream {first})")
