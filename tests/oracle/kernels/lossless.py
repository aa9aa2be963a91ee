"""Lossless packing of planes in plain numpy; `native/lossless/lossless.h` defines the streams."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from oracle.kernels.rans import rans_decode, rans_encode, rans_tables

if TYPE_CHECKING:
    from ctxreuse._native import Memory

__all__ = ["lossless_decode", "lossless_encode"]

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_SCHEME, _LANES, _FREE, _FINE, _ESCAPE = 2, 64, 128, 3, 15
_MOST = 2**31 - 1
_SECTION = struct.Struct("<BBHII")


class _Type(NamedTuple):
    """An element type: its bytes, the mantissa's bits of its upper half, and the exponent's mask."""

    code: int
    item: int
    bits: int
    widest: int
    low: int


_TYPES = (_Type(0, 4, 7, 255, 176), _Type(1, 2, 10, 31, 72), _Type(2, 2, 7, 255, 48))


class _Section:
    """A plane's tokens that share one code: whole groups of 64, or the rest."""

    def __init__(self, kind: _Type, shape: tuple[int, int, int], rest: bool) -> None:
        heads, tokens, dim = shape
        whole, channels = tokens // _LANES * _LANES, heads * dim
        self.kind, self.heads, self.dim = kind, heads, dim
        self.first, self.tokens = (whole, tokens - whole) if rest else (0, whole)
        together = _LANES // self.tokens if rest and self.tokens else 1
        self.lanes = together * self.tokens if rest else _LANES
        self.rows = -(-channels // together) if self.tokens else 0
        self.each = 1 if rest else whole // _LANES
        self.steps = self.rows * self.each
        self.raw = channels * self.tokens * kind.item
        self.classes = self.rows + -(-self.rows // 4)
        self.low = self.steps * kind.low

    def widen(self, box: NDArray[Any]) -> NDArray[Any]:
        """The section's elements [heads, tokens, dim] as steps of 64."""
        flat = box.transpose(0, 2, 1).reshape(-1)
        steps = np.zeros(self.steps * self.lanes, flat.dtype)
        steps[: flat.size] = flat
        return np.ascontiguousarray(steps.reshape(self.steps, self.lanes)[:, np.arange(_LANES) % self.lanes])

    def narrow(self, steps: NDArray[Any]) -> NDArray[Any]:
        """The inverse."""
        flat = steps[:, : self.lanes].reshape(-1)[: self.heads * self.dim * self.tokens]
        return flat.reshape(self.heads, self.dim, self.tokens).transpose(0, 2, 1)


def lossless_encode(
    src: Memory, dtype: int, offset: int, strides: Sequence[int], shape: Sequence[int], out: Memory
) -> int:
    """Pack a box into `out`; returns the bytes written."""
    from oracle.kernels import reference

    sizes, box = _volume(shape), reference._window(src, dtype, offset, strides, shape, "src")
    kind = _TYPES[dtype]
    to = _flat(out)
    if to.size < prod(sizes) * kind.item + 40:
        raise ValueError(f"out: needs {prod(sizes) * kind.item + 40} contiguous bytes")
    parts = [struct.pack("<BBBB3I", _SCHEME, dtype, 3, 0, *sizes)]
    for rest in (False, True):
        section = _Section(kind, sizes, rest)
        if section.raw:
            piece = box[:, section.first : section.first + section.tokens]
            parts.append(_encode(section, piece) or _SECTION.pack(0, 0, 0, 0, 0) + piece.tobytes())
    stream = b"".join(parts)
    to[: len(stream)] = np.frombuffer(stream, np.uint8)
    return len(stream)


def lossless_decode(
    dst: Memory,
    dtype: int,
    offset: int,
    strides: Sequence[int],
    heads: int,
    dim: int,
    srcs: Sequence[Memory],
    offsets: Sequence[int],
    sizes: Sequence[int],
    token_counts: Sequence[int],
    checksums: Sequence[int] | None,
) -> int:
    """Unpack the streams of a run of blocks; returns the first that is not right, or -1."""
    from oracle.kernels import reference

    if not len(srcs) == len(offsets) == len(sizes) == len(token_counts) == len(checksums or srcs):
        raise ValueError("srcs, offsets, sizes, counts and checksums must be as many")
    shapes = [_volume((heads, count, dim)) for count in token_counts]
    streams = []
    for src, at, size in zip(srcs, offsets, sizes, strict=True):
        data = _flat(src)
        if at < 0 or size < 0 or at + size > data.size:
            raise ValueError(f"srcs: {size} bytes at byte {at} leave the buffer of {data.size} bytes")
        streams.append(data[at : at + size])
    to = reference._window(dst, dtype, offset, strides, (heads, sum(token_counts), dim), "dst", writable=True)
    token = 0
    for i, (data, shape) in enumerate(zip(streams, shapes, strict=True)):
        if checksums is not None and xxhash.xxh3_64_intdigest(data.tobytes()) != checksums[i]:
            return i
        plane = _decode_plane(data, dtype, shape)
        if plane is None:
            return i
        if plane.size:
            to[:, token : token + shape[1]] = plane
        token += shape[1]
    return -1


def _flat(buffer: Any) -> Bytes:
    return np.frombuffer(buffer, np.uint8) if memoryview(buffer).nbytes else np.zeros(0, np.uint8)


def _volume(shape: Sequence[int]) -> tuple[int, int, int]:
    heads, tokens, dim = (int(n) for n in shape)
    if min(heads, tokens, dim) < 0 or max(heads, tokens, dim, heads * tokens * dim) > _MOST:
        raise ValueError(f"plane ({heads}, {tokens}, {dim}) is too large to be packed")
    return heads, tokens, dim


# ---- the model


@cache
def _model() -> tuple[Any, Ints, NDArray[np.bool_]]:
    """Prepared tables, costs [symbol, class] in sixteenths of a bit, and which symbols a class has [class, symbol]."""
    freq = np.array([[int(f) for f in row.split()] for row in _FREQUENCIES], np.int64)
    sixteenths = np.array([0] + [_bits_of(f) for f in range(1, 256)])
    own = sixteenths[freq] + np.where(np.arange(32) % 16 >= 2 * _FINE, 16, 0)
    escape = sixteenths[freq[:, _ESCAPE]] + 160  # exponent, sign, first bit
    coded = (freq > 0) & (np.arange(32) != _ESCAPE)
    costs = np.where(coded, own, escape[:, None]).T
    return rans_tables(freq.astype(np.uint8)), costs, freq > 0


def _bits_of(f: int) -> int:
    """16 * (8 - log2 f), rounded up, by the same whole numbers as the native core."""
    log = f.bit_length() - 1
    x = f << (15 - log)
    for _ in range(4):
        x = x * x >> 15
        log = 2 * log + (x >> 16)
        x >>= x >> 16
    return 128 - log


# ---- encoding


def _split(kind: _Type, values: NDArray[Any]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Sign, exponent, first bit and rest of the upper halves' mantissas, and the lower halves."""
    wide = values.astype(np.int64)
    half, under = (wide >> 16, wide & 0xFFFF) if kind.item == 4 else (wide, wide)
    first, rest = half >> (kind.bits - 1) & 1, half & ((1 << (kind.bits - 1)) - 1)
    return half >> 15 & 1, half >> kind.bits & kind.widest, first, rest, under


def _encode(section: _Section, box: NDArray[Any]) -> bytes | None:
    kind = section.kind
    if section.classes + section.low + 256 >= section.raw:
        return None
    tables, costs, present = _model()
    sign, exponent, first, rest, under = _split(kind, section.widen(box))
    rows = np.repeat(np.arange(section.rows), section.each)
    top = exponent.reshape(section.rows, -1).max(1)
    symbol = _symbols(sign, exponent, first, top[rows]).reshape(section.rows, section.each, _LANES)
    # Flip by a row's first step, class by every second lane of its first 64.
    known = (symbol[:, 0] != _ESCAPE).sum(1)
    flip = (2 * (symbol[:, 0] >> 4).sum(1) > known).astype(np.int64)
    turned = np.where(symbol == _ESCAPE, symbol, symbol ^ flip[:, None, None] << 4)[:, :_LANES]
    asked = turned[:, :, ::2].reshape(section.rows, -1)
    counts = np.stack([np.bincount(row, minlength=32) for row in asked])
    chosen = (counts @ costs).argmin(1)
    base = int(top.max())
    top = np.maximum(top, base - 15)
    symbol = _symbols(sign ^ flip[rows][:, None], exponent, first, top[rows])
    symbol = np.where(present[chosen[rows][:, None], symbol], symbol, _ESCAPE)
    escaped = symbol == _ESCAPE
    tail = _packed(first[symbol % 16 >= 2 * _FINE])
    tail += exponent[escaped].astype(np.uint8).tobytes() + _packed(sign[escaped])
    tail = tail.ljust(_FREE, b"\0")
    coded = np.empty(256 + symbol.size, np.uint8)
    places, step_tables = np.zeros(2, np.int64), chosen[rows].astype(np.uint16)
    sent = np.frombuffer(tail[:_FREE], "<u2")
    size = np.array([symbol.size], np.int64)
    rans_encode(tables, coded, places, symbol.astype(np.uint8).reshape(-1), size, step_tables, sent)
    shift = base - top
    more = (shift >> 3 | flip << 1).astype(np.uint8)
    more = np.pad(more, (0, -section.rows % 4)).reshape(-1, 4)
    fours = (more << np.arange(0, 8, 2, dtype=np.uint8)).sum(1).astype(np.uint8)
    classes = (chosen | shift << 5 & 0xFF).astype(np.uint8).tobytes() + fours.tobytes()
    stream = coded[: places[1]].tobytes()
    body: bytes = classes + _low_bytes(kind, rest, under) + stream + tail[_FREE:]
    if len(body) >= section.raw:
        return None
    return _SECTION.pack(1, base, 0, len(stream), len(tail)) + body


def _symbols(sign: Ints, exponent: Ints, first: Ints, top: Ints) -> Ints:
    down = top[:, None] - exponent
    level = np.where(down < _FINE, 2 * down + 1 - first, np.minimum(down + _FINE, _ESCAPE))
    return np.where(level == _ESCAPE, _ESCAPE, level | sign << 4)


def _packed(bits: Ints) -> bytes:
    return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


def _low_bytes(kind: _Type, rest: Ints, under: Ints) -> bytes:
    if kind.bits == 10:
        ninth = np.packbits((rest >> 8).astype(np.uint8), axis=1, bitorder="little")
        return np.concatenate([(rest & 255).astype(np.uint8), ninth], 1).tobytes()
    parts: list[Any] = [rest[:, 16 * i : 16 * i + 16] | (rest[:, 48:] >> 2 * i & 3) << 6 for i in range(3)]
    if kind.item == 4:
        parts.append(under.astype("<u2").view(np.uint8).reshape(len(under), -1))
    return np.concatenate([part.astype(np.uint8) for part in parts], 1).tobytes()


# ---- decoding


def _decode_plane(data: Bytes, dtype: int, shape: tuple[int, int, int]) -> NDArray[Any] | None:
    if data.size < 4 or data[0] != _SCHEME or data[1] != dtype or data[2] > 8 or data[3]:
        return None
    axes = int(data[2])
    at = 4 + 4 * axes
    if data.size < at:
        return None
    lengths = data[4:at].copy().view("<u4").tolist()
    box = (prod(lengths[:-2]), *([1, 1, *lengths][-2:])) if axes else (1, 1, 1)
    if box != shape:
        return None
    kind = _TYPES[dtype]
    plane = np.empty(shape, f"<u{kind.item}")
    for rest in (False, True):
        section = _Section(kind, shape, rest)
        if not section.raw:
            continue
        if data.size - at < _SECTION.size:
            return None
        mode, base, zero, rans, tail = _SECTION.unpack_from(data.data, at)
        at += _SECTION.size
        size = section.classes + section.low + rans + tail - _FREE if mode else section.raw
        if (
            mode > 1
            or zero
            or size > data.size - at
            or (mode and tail < _FREE)
            or (not mode and (base or rans or tail))
        ):
            return None
        body = data[at : at + size]
        at += size
        piece = _decode(section, base, rans, tail, body) if mode else _plain(section, body)
        if piece is None:
            return None
        plane[:, section.first : section.first + section.tokens] = piece
    return plane if at == data.size else None


def _plain(section: _Section, body: Bytes) -> NDArray[Any]:
    return body.copy().view(f"<u{section.kind.item}").reshape(section.heads, section.tokens, section.dim)


def _decode(section: _Section, base: int, rans: int, tail: int, body: Bytes) -> NDArray[Any] | None:
    kind, tables = section.kind, _model()[0]
    classes, fours = body[: section.rows].astype(np.int64), body[section.rows : section.classes].astype(np.int64)
    low = body[section.classes : section.classes + section.low].reshape(section.steps, -1)
    stream, kept = body[section.classes + section.low :][:rans], body[section.classes + section.low + rans :]
    two = (fours[:, None] >> np.arange(0, 8, 2) & 3).reshape(-1)[: section.rows]
    top, flip, rows = base - (classes >> 5 | (two & 1) << 3), two >> 1, np.repeat(np.arange(section.rows), section.each)
    symbols, seeds = np.empty(section.steps * _LANES, np.uint8), np.empty(_LANES, np.uint16)
    places, size = np.array([0, rans], np.int64), np.array([symbols.size], np.int64)
    step_tables = (classes & 31)[rows].astype(np.uint16)
    if rans_decode(tables, stream, places, symbols, size, step_tables, seeds) >= 0:
        return None
    symbol = symbols.reshape(section.steps, _LANES).astype(np.int64)
    level, escaped = symbol % 16, symbol == _ESCAPE
    coarse = level >= 2 * _FINE
    bits, escapes = -(-int(coarse.sum()) // 8), int(escaped.sum())
    if max(_FREE, bits + escapes + -(-escapes // 8)) != tail:
        return None
    lists = np.concatenate([seeds.astype("<u2").view(np.uint8), kept])
    exponent = top[rows][:, None] - np.where(coarse, level - _FINE, level >> 1) & kind.widest
    sign, first = symbol >> 4 ^ flip[rows][:, None], symbol & 1 ^ 1
    first[coarse] = np.unpackbits(lists[:bits], bitorder="little")[: int(coarse.sum())]
    exponent[escaped] = lists[bits : bits + escapes] & kind.widest
    sign[escaped] = np.unpackbits(lists[bits + escapes :], bitorder="little")[:escapes]
    half = sign << 15 | exponent << kind.bits | first << (kind.bits - 1) | _mantissas(kind, low)
    if kind.item == 4:
        half = half << 16 | low[:, 48:].copy().view("<u2")
    return section.narrow(half).astype(f"<u{kind.item}")


def _mantissas(kind: _Type, low: Bytes) -> Ints:
    if kind.bits == 10:
        ninth = np.unpackbits(low[:, _LANES:], axis=1, bitorder="little").astype(np.int64)
        return low[:, :_LANES] | ninth << 8
    six = low[:, :48].astype(np.int64)
    return np.concatenate([six & 63, six[:, :16] >> 6 | six[:, 16:32] >> 6 << 2 | six[:, 32:] >> 6 << 4], 1)


# Of native/lossless/tables.inc: frequencies of the symbols of each class.
_FREQUENCIES = (
    "236 14 4 0 0 0 0 0 0 0 0 0 0 0 0 2 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
    "91 152 10 2 0 0 0 0 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
    "4 236 14 0 0 0 0 0 0 0 0 0 0 0 0 2 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
    "22 144 62 21 3 2 1 0 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
    "1 69 119 55 7 3 1 0 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
    "21 90 59 44 15 10 7 3 1 1 0 0 0 0 0 1 0 0 0 0 0 1 1 1 1 0 0 0 0 0 0 0",
    "0 18 92 112 22 8 2 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
    "2 49 75 76 25 15 7 2 1 0 0 0 0 0 0 1 0 0 0 0 0 0 1 1 1 0 0 0 0 0 0 0",
    "0 11 48 104 48 28 12 3 1 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
    "3 36 52 64 29 24 18 7 3 1 1 0 0 0 0 1 0 0 0 1 1 3 5 3 2 1 1 0 0 0 0 0",
    "0 9 31 75 47 39 27 9 4 2 0 0 0 0 0 1 0 0 0 0 1 1 3 3 2 1 1 0 0 0 0 0",
    "12 45 38 41 20 19 17 8 4 2 1 1 0 0 0 1 0 2 3 7 5 7 10 6 3 2 1 1 0 0 0 0",
    "1 15 29 50 29 30 27 12 5 3 1 1 0 0 0 1 0 1 2 5 5 8 13 8 5 3 1 1 0 0 0 0",
    "0 7 13 40 34 42 41 18 8 4 2 1 0 0 0 1 0 0 0 2 3 6 12 10 6 3 2 1 0 0 0 0",
    "3 23 24 36 21 22 23 11 4 3 1 1 0 0 0 1 2 3 6 13 12 14 17 9 4 2 1 0 0 0 0 0",
    "10 31 24 27 14 15 15 7 4 2 1 0 1 0 0 1 5 18 15 19 11 11 12 6 3 2 1 0 1 0 0 0",
    "9 23 21 29 17 18 19 10 5 2 1 1 0 0 0 1 0 9 11 18 12 15 17 10 5 2 0 1 0 0 0 0",
    "0 8 15 36 24 28 26 13 6 4 2 1 0 0 0 1 0 4 8 16 12 9 18 11 8 3 2 1 0 0 0 0",
    "1 18 25 32 18 18 18 9 4 2 1 0 0 0 0 1 0 13 17 24 13 14 14 7 4 2 0 0 1 0 0 0",
    "6 18 18 26 16 18 20 11 6 3 2 1 0 0 0 1 6 14 12 18 11 13 16 9 5 3 2 1 0 0 0 0",
    "0 5 8 26 24 31 36 18 7 5 2 1 0 0 0 1 0 2 2 7 10 17 25 15 7 4 2 1 0 0 0 0",
    "1 8 21 37 20 19 18 9 5 3 1 1 0 0 0 1 2 7 17 27 15 15 14 8 3 2 1 1 0 0 0 0",
    "1 8 22 32 20 19 23 12 8 4 2 1 0 0 0 1 0 3 6 13 13 20 24 14 5 2 2 1 0 0 0 0",
    "1 8 14 27 20 24 27 14 7 4 2 1 4 0 0 1 1 4 7 15 12 16 21 12 7 4 2 1 0 0 0 0",
    "1 8 12 26 21 25 30 16 8 4 2 1 0 1 0 1 0 3 5 13 12 16 22 13 7 3 2 1 2 1 0 0",
    "1 16 17 21 17 21 23 14 7 4 2 1 0 0 0 1 0 8 13 20 14 17 18 8 7 3 2 1 0 0 0 0",
    "3 9 11 22 17 23 30 18 11 5 2 1 0 0 0 1 0 1 4 12 12 16 24 16 9 6 2 1 0 0 0 0",
    "2 5 8 23 20 25 30 16 7 3 2 1 0 0 0 1 1 8 12 21 14 16 20 12 5 1 2 1 0 0 0 0",
    "0 4 9 26 23 27 28 14 8 2 2 1 0 0 0 1 0 3 4 20 17 22 22 10 6 4 2 1 0 0 0 0",
    "0 4 4 12 15 25 39 25 14 7 4 2 1 0 0 1 0 2 2 7 8 16 27 19 11 6 3 1 1 0 0 0",
    "0 3 6 15 15 24 34 21 12 7 3 1 0 0 0 1 1 5 7 15 13 19 24 15 8 4 2 1 0 0 0 0",
    "5 5 5 5 5 5 10 10 10 10 10 10 10 10 10 16 5 5 5 5 5 5 10 10 10 10 10 10 10 10 10 0",
)
