"""Entropy coding of small alphabets: 64-lane rANS streams under tables that may change every 64 symbols.

A stream codes n symbols below 32; symbol i belongs to lane i % 64 and step i // 64, and each step has the number of
its table in `table_of_step` [ceil(n / 64)]. Neither n, the tables nor the steps travel in the stream. `seeds` are 16
free bits a lane: the encoder takes any, the decoder gives them back, and they cost nothing. `native/rans/rans.h`
defines the bytes.

Every instruction set gives the same bytes. The decoder takes any bytes: what is no stream of these
tables and this length is a FormatError (64 end states and the number of words must be right; changed bits may still
decode to other symbols, so keep a checksum where that matters), and no memory outside of the arrays is touched.

Threads. Any thread may call anything; tables are immutable. The interpreter lock is released above 4,096 symbols. The
forms for many streams spread more than `PARALLEL_SYMBOLS` over one thread a core, which are kept for the next call.

Errors. ValueError: sizes, shapes, tables, a symbol without frequency. FormatError: bytes.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctxreuse.errors import FormatError
from ctxreuse.kernels.dispatch import native
from ctxreuse.kernels.threads import cores, spread

__all__ = [
    "LANES",
    "PARALLEL_SYMBOLS",
    "SYMBOLS",
    "RansTables",
    "rans_bound",
    "rans_count",
    "rans_decode",
    "rans_decode_many",
    "rans_encode",
    "rans_encode_many",
    "rans_name",
]

Bytes = NDArray[np.uint8]

LANES: Final = 64
"""Lanes of a stream, and so symbols of a step."""
SYMBOLS: Final = 32
"""Symbols of a table; those not used have the frequency 0."""
PARALLEL_SYMBOLS: Final = 1 << 20
"""Symbols from which one call uses several threads: below, waking them costs more than they save."""
_STATES: Final = 256


class RansTables:
    """Prepared tables, 898 bytes each, from `freqs` uint8 [tables, 32]; a single row [32] is one table.

    Each row sums to 256 with at least two symbols present, else ValueError. At most 65,536 tables.
    """

    __slots__ = ("freqs", "prepared")

    def __init__(self, freqs: ArrayLike) -> None:
        rows = np.atleast_2d(np.asarray(freqs))
        if rows.ndim != 2 or rows.shape[1] != SYMBOLS or rows.dtype.kind not in "iu":
            raise ValueError(f"freqs: needs integers [tables, {SYMBOLS}], got {rows.dtype} {list(rows.shape)}")
        if rows.size and (rows.min() < 0 or rows.max() > 255):
            raise ValueError("freqs: a frequency is outside of 0..255")
        self.freqs: Bytes = rows.astype(np.uint8)
        """What the tables were made of, read-only."""
        self.freqs.flags.writeable = False
        self.prepared = native.rans_tables(self.freqs)
        """The form that the extension reads."""

    def __len__(self) -> int:
        return len(self.freqs)


def rans_name() -> str:
    """The implementation in use: that of `kernels.active()`, but `avx2` for AVX-512 without VBMI2."""
    return native.rans_name()


def rans_bound(n: int) -> int:
    """Bytes that suffice for any stream of n symbols."""
    return _STATES + n


def rans_encode(
    symbols: ArrayLike, tables: RansTables, table_of_step: ArrayLike, seeds: ArrayLike | None = None
) -> Bytes:
    """Encode symbols uint8 [n] with seeds uint16 [64] (default 0). ValueError for a symbol without frequency."""
    of = _symbols(symbols)
    rows = None if seeds is None else np.asarray(seeds).reshape(1, -1)
    return rans_encode_many(of, [of.size], tables, table_of_step, rows)[0]


def rans_decode(
    data: Any, n: int, tables: RansTables, table_of_step: ArrayLike, out: Bytes | None = None
) -> tuple[Bytes, NDArray[np.uint16]]:
    """Decode a stream (any buffer) of n symbols: symbols uint8 [n] (`out` if given) and seeds uint16 [64]."""
    of = _bytes(data)
    symbols, seeds = rans_decode_many(of, [0, of.size], [n], tables, table_of_step, out=out)
    return symbols, seeds[0]


def rans_encode_many(
    symbols: ArrayLike,
    counts: ArrayLike,
    tables: RansTables,
    table_of_step: ArrayLike,
    seeds: ArrayLike | None = None,
    *,
    out: Bytes | None = None,
) -> tuple[Bytes, NDArray[np.int64]]:
    """Encode many streams: symbols uint8 [sum(counts)] of counts [streams], seeds uint16 [streams, 64] (default 0).

    `table_of_step` lists the steps of all streams one after the other, or those of one stream if all streams have the
    same count and the same steps. Returns the bytes and offsets int64 [streams + 1]: stream i is data[offsets[i] :
    offsets[i + 1]]. The bytes are a view of `out`, uint8 of at least sum(256 + count), or of new memory of that size.
    """
    of, lengths = _symbols(symbols), _lengths(counts)
    steps = _steps(table_of_step, lengths)
    first = np.zeros((len(lengths), LANES), np.uint16) if seeds is None else _seeds(seeds, len(lengths))
    room = int(lengths.sum()) + _STATES * len(lengths)
    if out is None:
        out = np.empty(room, np.uint8)
    elif out.dtype != np.uint8 or out.ndim != 1 or out.size < room:
        raise ValueError(f"out: needs uint8 [{room}] or more")
    offsets = np.zeros(len(lengths) + 1, np.int64)
    parts = _parts(lengths, steps.size)
    rooms = [(_STATES * lo + symbol, _STATES * hi + end) for lo, hi, symbol, end, _, _ in parts]
    ends = [np.zeros(hi - lo + 1, np.int64) for lo, hi, *_ in parts]

    def encode(i: int) -> int:
        lo, hi, symbol, end, step, last = parts[i]
        data = out[slice(*rooms[i])]
        return native.rans_encode(
            tables.prepared, data, ends[i], of[symbol:end], lengths[lo:hi], steps[step:last], first[lo:hi]
        )

    spread(encode, len(parts))
    at = 0
    for (lo, hi, *_), (start, _), places in zip(parts, rooms, ends, strict=True):
        size = int(places[-1])
        if at != start:
            out[at : at + size] = out[start : start + size]
        offsets[lo : hi + 1] = places + at
        at += size
    return out[:at], offsets


def rans_decode_many(
    data: Any,
    offsets: ArrayLike,
    counts: ArrayLike,
    tables: RansTables,
    table_of_step: ArrayLike,
    *,
    out: Bytes | None = None,
) -> tuple[Bytes, NDArray[np.uint16]]:
    """Decode many streams: symbols uint8 [sum(counts)] (`out` if given) and seeds uint16 [streams, 64].

    Arguments as for and from `rans_encode_many`; streams may lie anywhere in `data`, as long as each ends where the
    next begins. FormatError names the first stream found corrupt; the contents of `out` are then undefined.
    """
    of, lengths = _bytes(data), _lengths(counts)
    steps = _steps(table_of_step, lengths)
    places = np.ascontiguousarray(offsets, np.int64)
    total = int(lengths.sum())
    if places.shape != (len(lengths) + 1,):
        raise ValueError(f"offsets: {len(lengths)} streams need {len(lengths) + 1}, got {list(places.shape)}")
    if out is None:
        out = np.empty(total, np.uint8)
    elif out.dtype != np.uint8 or out.shape != (total,):
        raise ValueError(f"out: needs uint8 [{total}]")
    seeds = np.empty((len(lengths), LANES), np.uint16)
    parts = _parts(lengths, steps.size)

    def decode(i: int) -> int:
        lo, hi, symbol, end, step, last = parts[i]
        bad = native.rans_decode(
            tables.prepared, of, places[lo : hi + 1], out[symbol:end], lengths[lo:hi], steps[step:last], seeds[lo:hi]
        )
        return bad if bad < 0 else bad + lo

    bad = [stream for stream in spread(decode, len(parts)) if stream >= 0]
    if bad:
        raise FormatError("bytes are no rANS stream of these tables and this length", where=f"stream {min(bad)}")
    return out, seeds


def rans_count(symbols: ArrayLike, table_of_step: ArrayLike, tables: int) -> NDArray[np.uint32]:
    """Count each symbol of one stream by table: uint32 [tables, 32]."""
    of = _symbols(symbols)
    counts = np.zeros((tables, SYMBOLS), np.uint32)
    native.rans_count(of, _steps(table_of_step, np.array([of.size])), counts)
    return counts


def _symbols(symbols: ArrayLike) -> Bytes:
    of = np.asarray(symbols)
    if of.dtype != np.uint8:
        raise ValueError(f"symbols: needs uint8, got {of.dtype}")
    return np.ascontiguousarray(of).reshape(-1)


def _bytes(data: Any) -> Bytes:
    return np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.zeros(0, np.uint8)


def _lengths(counts: ArrayLike) -> NDArray[np.int64]:
    lengths = np.ascontiguousarray(counts, np.int64)
    # Their sum must not wrap.
    if lengths.ndim != 1 or (lengths.size and (lengths.min() < 0 or lengths.max() > 2**62 // lengths.size)):
        raise ValueError("counts: needs the number of symbols of each stream")
    return lengths


def _steps(table_of_step: ArrayLike, lengths: NDArray[np.int64]) -> NDArray[np.uint16]:
    steps = np.asarray(table_of_step)
    if steps.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"table_of_step: needs uint8 or uint16, got {steps.dtype}")
    steps = np.ascontiguousarray(steps, np.uint16).reshape(-1)
    needed = int((-(-lengths // LANES)).sum())
    if steps.size == needed:
        return steps
    if len(lengths) and steps.size * len(lengths) == needed and (lengths == lengths[0]).all():
        return np.tile(steps, len(lengths))
    raise ValueError(f"table_of_step: {needed} steps of 64 symbols, got {steps.size} numbers")


def _seeds(seeds: ArrayLike, streams: int) -> NDArray[np.uint16]:
    rows = np.asarray(seeds)
    if rows.dtype != np.uint16 or rows.shape != (streams, LANES):
        raise ValueError(f"seeds: needs uint16 [{streams}, {LANES}], got {rows.dtype} {list(rows.shape)}")
    return np.ascontiguousarray(rows)


def _parts(lengths: NDArray[np.int64], steps: int) -> list[tuple[int, int, int, int, int, int]]:
    """Runs of streams, one a thread: first and behind last stream, then symbol, then step."""
    total = int(lengths.sum())
    if total <= PARALLEL_SYMBOLS:
        return [(0, len(lengths), 0, total, 0, steps)]
    symbols = np.concatenate([[0], np.cumsum(lengths)])
    each = np.concatenate([[0], np.cumsum(-(-lengths // LANES))])
    threads = min(cores(), len(lengths), max(1, total // (PARALLEL_SYMBOLS // 2)))
    cuts = np.searchsorted(symbols, [total * i // threads for i in range(1, threads)])
    edges = sorted({0, *(int(cut) for cut in cuts), len(lengths)})
    return [
        (lo, hi, int(symbols[lo]), int(symbols[hi]), int(each[lo]), int(each[hi]))
        for lo, hi in itertools.pairwise(edges)
    ]
