"""The coded stream of one plane, in numpy: the reference that every native kernel must equal, bit for bit.

::

    offset  size  field (little-endian)
    0       1     scheme (1)
    1       1     index of the level in the card
    2       1     part: 0 whole, 1 refinement
    3       1     0
    4       2     tokens T
    6       2     cells: ceil(T / 64) groups of tokens, each times the plane's channel groups
    8       16    per cell: raw mask u64 (bit t: token t stands raw), rANS bytes u32, escapes u16, 0 u16
    ...           per cell: rANS stream, low bits, escapes int16, raw tokens (as the engine keeps them)

A cell codes the first n components of its tokens, component by component, so that a rANS step of 64 symbols is one
component with its own table. A symbol is ``q + 15``, or 31: an escape that stands in full at the end of the cell, as
does a value whose symbol the table does not know. A component with shift k has its k low bits as bit planes. The
token's scale travels in the seeds of the rANS lanes, where it costs nothing.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ctxreuse import kernels
from ctxreuse.codec.card import ChannelGroup, Coding
from ctxreuse.errors import FormatError

__all__ = [
    "CELL",
    "Cell",
    "Coder",
    "Entry",
    "join_cells",
    "quantise",
    "read_cell",
    "reconstruct",
    "split_cells",
    "write_cell",
]

CELL = 64
ESCAPE, _CENTRE = 31, 15
_LIMIT = 32000
#: Codes further from 0x8000 would leave the range of float32; sums of |q| from here on that of int32 (|basis| <= 8191).
_SCALES, _REACH = 2048, 1 << 18
_HEAD, _ENTRY = struct.Struct("<BBBBHH"), struct.Struct("<QIHH")
_F = np.float32
_POWERS = np.exp2(np.arange(32) / 32).astype(_F)
_THRESHOLDS = np.exp2((np.arange(16) - 15.5) / 16)

#: Raw mask, bytes of the rANS stream, escapes.
Entry: TypeAlias = tuple[int, int, int]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class Coder(NamedTuple):
    """All that one channel group needs at one level: ``group``, its ``coding``, the prepared ``tables`` and ``step``.

    ``base``: the coding of the level that this one refines; ``nested``: a level of step / 3 refines this one.
    """

    group: ChannelGroup
    coding: Coding
    tables: kernels.RansTables
    step: float
    base: Coding | None = None
    nested: bool = False


class Cell(NamedTuple):
    """A cell taken apart: q int32 [components, tokens], scale codes uint16 [tokens], raw bool [tokens], raw bytes."""

    q: Ints
    codes: npt.NDArray[np.uint16]
    raw: npt.NDArray[np.bool_]
    rows: bytes


def scales(codes: npt.NDArray[np.uint16], sign: int = 1) -> Floats:
    """2^(sign * (code - 0x8000) / 32) float32, from a table and an exponent, the same bits on every machine."""
    power = sign * (codes.astype(np.int32) - 0x8000)
    return np.asarray(np.ldexp(_POWERS[power & 31], power >> 5), _F)


def quantise(
    x: Floats, coder: Coder, raw: npt.NDArray[np.bool_]
) -> tuple[Ints, npt.NDArray[np.uint16], npt.NDArray[np.bool_]]:
    """Vectors x float32 [tokens, C] to q int32 [components, tokens], scale codes and which tokens must stay raw."""
    group, active = coder.group, len(coder.coding.table)
    with np.errstate(all="ignore"):
        centred = x - group.mean
        energy = np.zeros(len(x), _F)
        for c in range(x.shape[1]):
            energy += centred[:, c] * centred[:, c]
        bad = raw | ~np.isfinite(energy)
        mantissa, exponent = np.frexp(
            np.where(bad, 0, energy).astype(np.float64) * (2.0 ** (-2 * group.log_rms) / x.shape[1])
        )
        code = 0x8000 + 16 * exponent - 16 + np.searchsorted(_THRESHOLDS, mantissa, side="right")
        code = np.where(mantissa == 0, 0x8000, code)
        bad |= np.abs(code - 0x8000) > _SCALES
        codes = np.where(bad, 0x8000, code).astype(np.uint16)
        z = centred * scales(codes, -1)[:, None]
        y = np.zeros((active, len(x)), _F)
        for c in range(x.shape[1]):
            y += group.forward[:active, c, None] * z[None, :, c]
        step = _F(coder.step) / _F(3) if coder.nested else _F(coder.step)
        q = np.rint(y * (_F(1) / step))
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


def _steps(tables: npt.NDArray[np.uint8], tokens: int) -> npt.NDArray[np.uint8]:
    """The table of each step of 64 symbols: that of the component of its first symbol."""
    return np.asarray(tables[np.arange(0, len(tables) * tokens, 64) // max(tokens, 1)])


def _knows(coder: Coder, tables: npt.NDArray[np.uint8], tokens: int) -> npt.NDArray[np.bool_]:
    """Whether the table in force at each symbol has a frequency for it: bool [symbols, 32]."""
    return np.repeat(coder.tables.freqs[_steps(tables, tokens)] > 0, 64, axis=0)[: len(tables) * tokens]


def _fold(q: Ints, shift: npt.NDArray[np.uint8]) -> tuple[Ints, Ints]:
    half = np.where(shift > 0, 1 << shift.astype(np.int32) >> 1, 0)[:, None]
    high = (q + half) >> shift[:, None]
    return high, q - (high << shift[:, None]) + half


def write_cell(cell: Cell, coder: Coder, *, base: Ints | None = None) -> tuple[Entry, bytes]:
    """Code a cell: its entry (raw mask, rANS bytes, escapes) and its body. ``base``: q of the base for a refinement."""
    tokens = len(cell.raw)
    symbols, tables, low = _symbols(cell.q, coder, base)
    flat, known = symbols.reshape(-1), _knows(coder, tables, tokens)
    escaped = ~known[np.arange(flat.size), np.where((flat < 0) | (flat > 30), ESCAPE, flat)] | (flat < 0) | (flat > 30)
    escapes = cell.q.reshape(-1)[escaped].astype("<i2")
    flat = np.where(escaped, ESCAPE, flat).astype(np.uint8)
    low.reshape(-1)[escaped] = 0
    seeds = np.zeros(CELL, np.uint16)
    if base is None:
        seeds[:tokens] = cell.codes
    stream = kernels.rans_encode(flat, coder.tables, _steps(tables, tokens), seeds).tobytes() if flat.size else b""
    shift = coder.coding.shift.copy()
    shift[: 0 if base is None else len(base)] = 0
    planes = [
        np.packbits(low[c] >> bit & 1, bitorder="little").tobytes() for c, k in enumerate(shift) for bit in range(k)
    ]
    mask = sum(1 << t for t in np.flatnonzero(cell.raw).tolist())
    rows = cell.rows if base is None else b""
    return (mask, len(stream), len(escapes)), stream + b"".join(planes) + escapes.tobytes() + rows


def _symbols(q: Ints, coder: Coder, base: Ints | None) -> tuple[Ints, npt.NDArray[np.uint8], Ints]:
    """Symbols (may lie outside of the alphabet), tables of the components, low bits."""
    high, low = _fold(q, coder.coding.shift)
    if base is None:
        return high + _CENTRE, coder.coding.table, low
    refined = (q[: len(base)] - 3 * base) * np.where(base < 0, -1, 1) + 1
    refined = np.where((refined < 0) | (refined > 2), ESCAPE, refined)
    tables = np.concatenate([coder.coding.refine, coder.coding.table[len(base) :]])
    low[: len(base)] = 0
    return np.concatenate([refined, high[len(base) :] + _CENTRE]), tables, low


def read_cell(
    body: memoryview, entry: Entry, tokens: int, row_bytes: int, coder: Coder, base: Cell | None = None
) -> Cell:
    """Decode a cell; with ``base`` its refinement. FormatError unless the body is what the entry says."""
    mask, rans, count = entry
    coding = coder.coding
    first = 0 if base is None else len(base.q)
    tables = coding.table if base is None else np.concatenate([coding.refine, coding.table[first:]])
    shift = coding.shift.astype(np.int32).copy()
    shift[:first] = 0
    raw = np.array([mask >> t & 1 for t in range(tokens)], bool)
    plane = -(-tokens // 8)
    row = 0 if base is not None else row_bytes * int(raw.sum())
    if mask >> tokens or len(body) != rans + plane * int(shift.sum()) + 2 * count + row:
        raise FormatError("a coded cell has another length than its entry says")
    n = len(tables) * tokens
    flat, seeds = np.empty(0, np.uint8), np.full(CELL, 0x8000, np.uint16)
    if n:
        flat, seeds = kernels.rans_decode(body[:rans], n, coder.tables, _steps(tables, tokens))
    elif rans:
        raise FormatError("a coded cell without components has a stream")
    at, low = rans, np.zeros((len(tables), tokens), np.int32)
    for c, k in enumerate(shift):
        for bit in range(k):
            bits = np.unpackbits(np.frombuffer(body, np.uint8, plane, at), bitorder="little")
            if bits[tokens:].any():
                raise FormatError("a coded cell has low bits of tokens that it has not")
            low[c] |= bits[:tokens].astype(np.int32) << bit
            at += plane
    high = flat.reshape(-1, tokens).astype(np.int32) - _CENTRE
    half = np.where(shift > 0, 1 << shift >> 1, 0)[:, None]
    q = (high << shift[:, None]) + low - half
    if base is not None:
        refined = flat[: first * tokens].reshape(-1, tokens).astype(np.int32) - 1
        if (refined[refined != ESCAPE - 1] > 1).any():
            raise FormatError("a refinement has a symbol that is none")
        q[:first] = 3 * base.q + refined * np.where(base.q < 0, -1, 1)
    escaped = np.flatnonzero(flat == ESCAPE)
    if len(escaped) != count:
        raise FormatError(f"a coded cell has {len(escaped)} escapes and lists {count}")
    q.reshape(-1)[escaped] = np.frombuffer(body, "<i2", count, at)
    rows = bytes(body[at + 2 * count :])
    codes = seeds[:tokens].astype(np.int32) - 0x8000
    if (np.abs(q) > 0x7FFF).any() or (n and seeds[tokens:].any()) or (base is not None and n and seeds.any()):
        raise FormatError("a coded cell has numbers out of range")
    if base is None and ((np.abs(codes) > _SCALES).any() or codes[raw].any()):
        raise FormatError("a coded cell has a scale out of range")
    if base is None:
        return Cell(q, seeds[:tokens].copy(), raw, rows)
    if (raw != base.raw).any():
        raise FormatError("a refinement and its base differ in the tokens that stand raw")
    return Cell(q, base.codes, raw, base.rows)


def join_cells(level: int, part: int, tokens: int, cells: list[tuple[Entry, bytes]]) -> bytes:
    """A plane's stream of its cells, token group by token group."""
    entries = b"".join(_ENTRY.pack(*entry, 0) for entry, _ in cells)
    return _HEAD.pack(1, level, part, 0, tokens, len(cells)) + entries + b"".join(body for _, body in cells)


def split_cells(
    data: memoryview, level: int, part: int, coders: list[Coder], widths: list[int]
) -> tuple[int, list[tuple[Entry, memoryview]]]:
    """Tokens of a stream and its cells' entries and bodies; FormatError unless they fill ``data`` exactly.

    ``widths``: bytes of a raw token of each channel group, in the order of ``coders``.
    """
    if len(data) < _HEAD.size:
        raise FormatError(f"{len(data)} bytes are too few for a coded plane")
    scheme, number, kind, zero, tokens, count = _HEAD.unpack_from(data)
    if (scheme, number, kind, zero) != (1, level, part, 0):
        raise FormatError(
            f"coded plane of scheme {scheme}, level {number}, part {kind} where level {level} was expected"
        )
    at = _HEAD.size + count * _ENTRY.size
    if not tokens or count != -(-tokens // CELL) * len(coders) or len(data) < at:
        raise FormatError(f"coded plane of {tokens} tokens with {count} cells")
    cells = []
    for i in range(count):
        mask, rans, escapes, spare = _ENTRY.unpack_from(data, _HEAD.size + i * _ENTRY.size)
        coder, width = coders[i % len(coders)], widths[i % len(coders)]
        here = min(CELL, tokens - i // len(coders) * CELL)
        shift = coder.coding.shift[len(coder.base.table) :] if part and coder.base is not None else coder.coding.shift
        length = rans + -(-here // 8) * int(shift.sum()) + 2 * escapes + (0 if part else mask.bit_count() * width)
        if spare or mask >> here or at + length > len(data):
            raise FormatError("a coded cell says impossible lengths")
        cells.append(((mask, rans, escapes), data[at : at + length]))
        at += length
    if at != len(data):
        raise FormatError(f"coded plane has {len(data) - at} bytes left over")
    return tokens, cells
