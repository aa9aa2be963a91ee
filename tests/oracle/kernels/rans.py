"""The entropy coder in plain numpy, one step of 64 lanes at a time; `native/rans/rans.h` defines the streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ctxreuse._native import Memory

__all__ = ["rans_count", "rans_decode", "rans_encode", "rans_tables"]

_LANES, _SYMBOLS, _STATES = 64, 32, 256
_LOW = 1 << 16  # states lie in [_LOW, 2**32)


class _Tables(NamedTuple):
    freq: NDArray[np.int64]
    cum: NDArray[np.int64]
    symbol: NDArray[np.uint8]  # [tables, 256], of a slot


def rans_tables(freqs: Memory) -> object:
    """Tables from frequencies uint8 [tables, 32]. ValueError unless each sums to 256 with two symbols present."""
    freq = _flat(freqs, np.uint8, "freqs")
    if freq.size % _SYMBOLS or not 1 <= freq.size // _SYMBOLS <= _LOW:
        raise ValueError(f"freqs: needs 1 to 65536 rows of 32, got {freq.size} bytes")
    freq = freq.reshape(-1, _SYMBOLS).astype(np.int64)
    for i, row in enumerate(freq):
        if row.sum() != 256 or (row > 0).sum() < 2:
            raise ValueError(f"freqs: table {i} needs a sum of 256 with at least two symbols present")
    symbol = np.stack([np.repeat(np.arange(_SYMBOLS, dtype=np.uint8), row) for row in freq])
    return _Tables(freq, np.cumsum(freq, 1) - freq, symbol)


def rans_encode(
    tables: object, data: Memory, offsets: Memory, symbols: Memory, counts: Memory, table_of_step: Memory, seeds: Memory
) -> int:
    """Write one stream after the other into `data` and where they begin and end into `offsets`. Returns -1."""
    known, out, places, flat, lengths, steps, first = _arrays(
        tables, data, offsets, symbols, counts, table_of_step, seeds
    )
    at = room = step = symbol = 0
    for length in lengths:
        room += _STATES + length
        if room > out.size:
            raise ValueError("out: has no room for a stream")
    places[0] = 0
    for i, length in enumerate(lengths):
        end = step + -(-length // _LANES)
        stream = _encode(known, flat[symbol : symbol + length], steps[step:end], first[i])
        out[at : at + len(stream)] = np.frombuffer(stream, np.uint8)
        at, step, symbol = at + len(stream), end, symbol + length
        places[i + 1] = at
    return -1


def rans_decode(
    tables: object, data: Memory, offsets: Memory, symbols: Memory, counts: Memory, table_of_step: Memory, seeds: Memory
) -> int:
    """Read each stream into `symbols` and `seeds`. Returns the first that is corrupt, or -1."""
    known, of, places, flat, lengths, steps, last = _arrays(
        tables, data, offsets, symbols, counts, table_of_step, seeds
    )
    for i in range(len(lengths)):
        if not 0 <= places[i] <= places[i + 1] <= of.size:
            raise ValueError(f"offsets: stream {i} lies outside of the data")
    step = symbol = 0
    for i, length in enumerate(lengths):
        end = step + -(-length // _LANES)
        out = flat[symbol : symbol + length]
        if not _decode(known, of[places[i] : places[i + 1]], out, steps[step:end], last[i]):
            return i
        step, symbol = end, symbol + length
    return -1


def rans_count(symbols: Memory, table_of_step: Memory, counts: Memory) -> None:
    """Add to counts uint32 [tables, 32] how often each symbol stands under each table."""
    of, steps = _flat(symbols, np.uint8, "symbols"), _flat(table_of_step, np.uint16, "table_of_step")
    out = _flat(counts, np.uint32, "counts", writable=True)
    if out.size % _SYMBOLS or steps.size != -(-of.size // _LANES):
        raise ValueError("counts: rows of 32, and one step for each 64 symbols, are needed")
    if (steps >= out.size // _SYMBOLS).any():
        raise ValueError("table_of_step: names a table that is not there")
    if (of >= _SYMBOLS).any():
        raise ValueError("symbols: one is 32 or more")
    cells = np.repeat(steps.astype(np.int64), _LANES)[: of.size] * _SYMBOLS + of
    out += np.bincount(cells, minlength=out.size).astype(np.uint32)


def _encode(tables: _Tables, symbols: Any, steps: Any, seeds: Any) -> bytes:
    x = _LOW + seeds.astype(np.int64)
    words: list[Any] = []
    for step in range(len(steps) - 1, -1, -1):
        s = symbols[step * _LANES : (step + 1) * _LANES]
        freq, cum = tables.freq[steps[step]][s], tables.cum[steps[step]][s]
        if not freq.all():
            raise ValueError("symbols: one has no frequency")
        now = x[: len(s)]
        full = now >= freq << 24
        words.append(now[full] & 0xFFFF)
        now[full] >>= 16
        now[:] = (now // freq << 8) + now % freq + cum
    read = np.concatenate([*words[::-1], np.zeros(0, np.int64)])
    stream: bytes = x.astype("<u4").tobytes() + read.astype("<u2").tobytes()
    return stream


def _decode(tables: _Tables, data: Any, symbols: Any, steps: Any, seeds: Any) -> bool:
    if data.size < _STATES or data.size % 2:
        return False
    x = data[:_STATES].copy().view("<u4").astype(np.int64)
    words = data[_STATES:].copy().view("<u2").astype(np.int64)
    if (x < _LOW).any():
        return False
    at = 0
    for step, table in enumerate(steps):
        out = symbols[step * _LANES : (step + 1) * _LANES]
        now = x[: len(out)]
        slot = now & 255
        out[:] = tables.symbol[table][slot]
        now[:] = tables.freq[table][out] * (now >> 8) + slot - tables.cum[table][out]
        low = np.flatnonzero(now < _LOW)
        if at + len(low) > len(words):
            return False
        now[low] = now[low] << 16 | words[at : at + len(low)]
        at += len(low)
    seeds[:] = x & 0xFFFF
    return at == len(words) and bool((x >> 16 == 1).all())


def _arrays(
    tables: object, data: Memory, offsets: Memory, symbols: Memory, counts: Memory, steps: Memory, seeds: Memory
) -> tuple[_Tables, Any, Any, Any, list[int], Any, Any]:
    if not isinstance(tables, _Tables):
        raise TypeError("tables: not made by rans_tables")
    lengths = [int(n) for n in _flat(counts, np.int64, "counts")]
    places, flat = _flat(offsets, np.int64, "offsets"), _flat(symbols, np.uint8, "symbols")
    table, first = _flat(steps, np.uint16, "table_of_step"), _flat(seeds, np.uint16, "seeds")
    if len(places) != len(lengths) + 1 or len(first) != len(lengths) * _LANES:
        raise ValueError(f"{len(lengths)} streams need {len(lengths) + 1} offsets and 64 seeds each")
    if min(lengths, default=0) < 0 or sum(lengths) != flat.size or sum(-(-n // _LANES) for n in lengths) != len(table):
        raise ValueError(f"counts: streams in {flat.size} symbols and {len(table)} steps do not fit")
    if (table >= len(tables.freq)).any():
        raise ValueError("table_of_step: a stream names a table that is not there")
    return tables, _flat(data, np.uint8, "data"), places, flat, lengths, table, first.reshape(-1, _LANES)


def _flat(buffer: Any, dtype: Any, what: str, *, writable: bool = False) -> Any:
    view = memoryview(buffer)
    if view.itemsize != np.dtype(dtype).itemsize or not view.c_contiguous or (writable and view.readonly):
        raise ValueError(f"{what}: needs a contiguous aligned array of {np.dtype(dtype).itemsize}-byte numbers")
    return np.frombuffer(view, dtype) if view.nbytes else np.zeros(0, dtype)
