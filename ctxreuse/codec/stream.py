"""The coded stream of one plane: its format, and its cells read and written in numpy, as merging levels needs them.

::

    offset  size  field (little-endian)
    0       1     scheme (1)
    1       1     index of the level in the profile
    2       1     part: 0 whole, 1 refinement
    3       1     0
    4       2     tokens T
    6       2     cells: ceil(T / 64) groups of tokens, each times the plane's channel groups
    8       16    per cell: raw mask u64 (bit t: token t is raw), rANS bytes u32, escapes u32
    ...           per cell: rANS stream, low bits, escapes int16, raw tokens (as the engine keeps them)

A cell codes the first n components of its tokens, component by component, so that a rANS step of 64 symbols is one
component with its own table. A symbol is ``q + 15``, or 31: an escape whose value follows at the end of the cell, as
does a value whose symbol is not in the table. A component with shift k has its k low bits as bit planes. The
token's scale travels in the seeds of the rANS lanes, at no cost. Transform and arithmetic are defined by
`native/klt/klt.h`; ``tests/oracle/codec`` has them in numpy, and kernels on processors and GPUs equal it bit for bit.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ctxreuse import kernels
from ctxreuse.codec.profile import ChannelGroup, Coding
from ctxreuse.errors import FormatError

__all__ = [
    "CELL",
    "Cell",
    "Coder",
    "Entry",
    "join_cells",
    "read_cell",
    "split_cells",
    "write_cell",
]

CELL = 64
ESCAPE, _CENTRE = 31, 15
#: Codes further from 0x8000 would leave the range of float32.
_SCALES = 2048
_HEAD, _ENTRY = struct.Struct("<BBBBHH"), struct.Struct("<QII")

#: Raw mask, bytes of the rANS stream, escapes.
Entry: TypeAlias = tuple[int, int, int]
Ints = npt.NDArray[np.int32]


class Coder(NamedTuple):
    """What one channel group needs at one level: ``group``, its ``coding``, the prepared ``tables`` and ``step``.

    ``base``: the coding of the level that this one refines; ``nested``: a level of step / 3 refines this one. The basis
    of ``group`` is that of the level. ``whole``: encode by it, not by ``group.forward``.
    """

    group: ChannelGroup
    coding: Coding
    tables: kernels.RansTables
    step: float
    base: Coding | None = None
    nested: bool = False
    whole: kernels.WholeNumbers | None = None


class Cell(NamedTuple):
    """A cell taken apart: q int32 [components, tokens], scale codes uint16 [tokens], raw bool [tokens], raw bytes."""

    q: Ints
    codes: npt.NDArray[np.uint16]
    raw: npt.NDArray[np.bool_]
    rows: bytes


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
    """Encode a cell to entry (raw mask, rANS bytes, escapes) and body. ``base``: q of the base, for a refinement."""
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
    """Decode a cell; with ``base``, its refinement. FormatError unless the body matches the entry."""
    mask, rans, count = entry
    coding = coder.coding
    first = 0 if base is None else len(base.q)
    tables = coding.table if base is None else np.concatenate([coding.refine, coding.table[first:]])
    shift = coding.shift.astype(np.int32).copy()
    shift[:first] = 0
    raw = np.array([mask >> t & 1 for t in range(tokens)], bool)
    plane = -(-tokens // 8)
    row = 0 if base is not None else row_bytes * int(raw.sum())
    length = rans + plane * int(shift.sum()) + 2 * count + row
    if mask >> tokens or len(body) != length:
        raise FormatError(f"corrupt stream: cell of {len(body)} bytes where its entry has {length}")
    n = len(tables) * tokens
    flat, seeds = np.empty(0, np.uint8), np.full(CELL, 0x8000, np.uint16)
    if n:
        flat, seeds = kernels.rans_decode(body[:rans], n, coder.tables, _steps(tables, tokens))
    elif rans:
        raise FormatError(f"corrupt stream: {rans} rANS bytes in a cell without components")
    at, low = rans, np.zeros((len(tables), tokens), np.int32)
    for c, k in enumerate(shift):
        for bit in range(k):
            bits = np.unpackbits(np.frombuffer(body, np.uint8, plane, at), bitorder="little")
            if bits[tokens:].any():
                raise FormatError(f"corrupt stream: low-order bits set beyond token {tokens - 1} of {CELL}")
            low[c] |= bits[:tokens].astype(np.int32) << bit
            at += plane
    high = flat.reshape(-1, tokens).astype(np.int32) - _CENTRE
    half = np.where(shift > 0, 1 << shift >> 1, 0)[:, None]
    q = (high << shift[:, None]) + low - half
    if base is not None:
        refined = flat[: first * tokens].reshape(-1, tokens).astype(np.int32) - 1
        highest = refined[refined != ESCAPE - 1].max(initial=0) + 1
        if highest > 2:
            raise FormatError(f"corrupt refinement: symbol {highest} is not in the table")
        q[:first] = 3 * base.q + refined * np.where(base.q < 0, -1, 1)
    escaped = np.flatnonzero(flat == ESCAPE)
    if len(escaped) != count:
        raise FormatError(f"corrupt stream: {len(escaped)} escapes in a cell that lists {count}")
    q.reshape(-1)[escaped] = np.frombuffer(body, "<i2", count, at)
    rows = bytes(body[at + 2 * count :])
    codes = seeds[:tokens].astype(np.int32) - 0x8000
    if (np.abs(q) > 0x7FFF).any() or (n and seeds[tokens:].any()) or (base is not None and n and seeds.any()):
        raise FormatError("corrupt stream: an integer or a seed is out of range")
    if base is None and ((np.abs(codes) > _SCALES).any() or codes[raw].any()):
        raise FormatError("corrupt stream: the scale of a token is out of range")
    if base is None:
        return Cell(q, seeds[:tokens].copy(), raw, rows)
    if (raw != base.raw).any():
        raise FormatError("refinement and base differ in which tokens are raw")
    return Cell(q, base.codes, raw, base.rows)


def join_cells(level: int, part: int, tokens: int, cells: list[tuple[Entry, bytes]]) -> bytes:
    """Join cells, token group by token group, to a plane's stream."""
    entries = b"".join(_ENTRY.pack(*entry) for entry, _ in cells)
    return _HEAD.pack(1, level, part, 0, tokens, len(cells)) + entries + b"".join(body for _, body in cells)


def split_cells(
    data: memoryview, level: int, part: int, coders: list[Coder], widths: list[int]
) -> tuple[int, list[tuple[Entry, memoryview]]]:
    """Split a stream into tokens and its cells' entries and bodies. FormatError unless they fill ``data`` exactly.

    ``widths``: bytes of a raw token of each channel group, in the order of ``coders``.
    """
    if len(data) < _HEAD.size:
        raise FormatError(f"corrupt stream: {len(data)} bytes are too few")
    scheme, number, kind, zero, tokens, count = _HEAD.unpack_from(data)
    if (scheme, number, kind, zero) != (1, level, part, 0):
        raise FormatError(
            f"stream of scheme {scheme}, level {number}, part {kind} where level {level}, part {part} was expected"
        )
    at = _HEAD.size + count * _ENTRY.size
    if not tokens or count != -(-tokens // CELL) * len(coders) or len(data) < at:
        raise FormatError(f"corrupt stream: {tokens} tokens in {count} cells")
    cells = []
    for i in range(count):
        mask, rans, escapes = _ENTRY.unpack_from(data, _HEAD.size + i * _ENTRY.size)
        coder, width = coders[i % len(coders)], widths[i % len(coders)]
        here = min(CELL, tokens - i // len(coders) * CELL)
        shift = coder.coding.shift[len(coder.base.table) :] if part and coder.base is not None else coder.coding.shift
        length = rans + -(-here // 8) * int(shift.sum()) + 2 * escapes + (0 if part else mask.bit_count() * width)
        if mask >> here or at + length > len(data):
            raise FormatError(f"corrupt stream: the lengths of cell {i} exceed the stream")
        cells.append(((mask, rans, escapes), data[at : at + length]))
        at += length
    if at != len(data):
        raise FormatError(f"corrupt stream: {len(data) - at} bytes left over")
    return tokens, cells
