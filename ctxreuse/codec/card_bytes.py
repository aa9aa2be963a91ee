"""Cards as bytes: written once, read as hostile, for a card may come from a peer.

::

    offset  size  field (little-endian)
    0       8     magic "CTXRCARD"
    8       4     version (1)
    12      4     header length h
    16      h     header: MessagePack, see _Header
    ...           arrays without padding: per group mean, gain, forward, basis; tables; per level and group table,
                  shift, refine
"""

from __future__ import annotations

import hashlib
import struct
from itertools import pairwise
from math import isfinite
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.codec.card import Card, CardLevel, ChannelGroup, Coding, PlaneCard, Rope
from ctxreuse.codec.levels import LevelInfo, parse_level
from ctxreuse.errors import FormatError
from ctxreuse.keys import KEY_BYTES

__all__ = ["MAX_CARD", "card_digest", "read_card", "write_card"]

MAGIC, VERSION = b"CTXRCARD", 1
MAX_CARD = 1 << 30
_PRELUDE = struct.Struct("<8sII")
_MAX_SHIFT, _MAX_BASIS = 8, 8191


class _Group(msgspec.Struct, array_like=True, frozen=True):
    first: int
    heads: int
    components: int
    log_rms: float


class _Plane(msgspec.Struct, array_like=True, frozen=True):
    layer: int
    role: Literal["k", "v"]
    heads: int
    dim: int
    rope: int
    groups: tuple[_Group, ...]


class _Rope(msgspec.Struct, array_like=True, frozen=True):
    style: Literal["half", "pairs", "none"]
    scale: float
    inv_freq: tuple[float, ...]


class _Level(msgspec.Struct, array_like=True, frozen=True):
    info: LevelInfo
    step: float
    active: tuple[int, ...]
    refined: tuple[int, ...]


class _Header(msgspec.Struct, array_like=True, frozen=True):
    model: bytes
    ropes: tuple[_Rope, ...]
    planes: tuple[_Plane, ...]
    tables: int
    levels: tuple[_Level, ...]
    notes: dict[str, str]


def card_digest(data: bytes | bytearray | memoryview) -> bytes:
    """SHA-256 of a card's bytes: its name."""
    return hashlib.sha256(data).digest()


def write_card(card: Card) -> bytes:
    """The bytes of a card; equal cards give equal bytes. Raises FormatError for a card that could not be read back."""
    planes = tuple(
        _Plane(p.layer, p.role, p.heads, p.dim, p.rope,
               tuple(_Group(g.first, g.heads, len(g.forward), float(g.log_rms)) for g in p.groups))
        for p in card.planes
    )  # fmt: skip
    ropes = tuple(_Rope(r.style, float(r.scale), tuple(r.inv_freq.tolist())) for r in card.ropes)
    levels = tuple(
        _Level(
            level.info,
            float(np.float32(level.step)),
            tuple(len(c.table) for c in level.codings),
            tuple(len(c.refine) for c in level.codings),
        )
        for level in card.levels
    )
    header = msgspec.msgpack.encode(
        _Header(card.model, ropes, planes, len(card.tables), levels, dict(sorted(card.notes.items())))
    )
    parts = [_PRELUDE.pack(MAGIC, VERSION, len(header)), header]
    for group in (g for p in card.planes for g in p.groups):
        parts += [np.ascontiguousarray(a, "<f4").tobytes() for a in (group.mean, group.gain, group.forward)]
        parts.append(np.ascontiguousarray(group.basis, "<i2").tobytes())
    parts.append(np.ascontiguousarray(card.tables, np.uint8).tobytes())
    parts += [
        a.astype(np.uint8).tobytes() for lv in card.levels for c in lv.codings for a in (c.table, c.shift, c.refine)
    ]
    data = b"".join(parts)
    read_card(data)
    return data


def read_card(data: bytes | bytearray | memoryview) -> Card:
    """Read a card; raises FormatError with the reason for bytes that are none. Arrays view ``data``, read-only."""
    try:
        return _read(memoryview(data).toreadonly())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"card header is malformed: {error}") from None


def _fail(what: str) -> FormatError:
    return FormatError(f"card {what}", fix="Calibrate again, or fetch the card anew")


def _read(view: memoryview) -> Card:
    if len(view) < _PRELUDE.size or len(view) > MAX_CARD:
        raise _fail(f"of {len(view)} bytes")
    magic, version, length = _PRELUDE.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise _fail(f"has magic {bytes(magic)!r} and version {version}, this reads version {VERSION}")
    if length > len(view) - _PRELUDE.size:
        raise _fail("is cut off")
    header = msgspec.msgpack.decode(view[_PRELUDE.size : _PRELUDE.size + length], type=_Header)
    if len(header.model) != KEY_BYTES or not 0 < header.tables <= 256 or not header.planes or len(header.levels) > 32:
        raise _fail("has impossible counts")
    take = _Taker(view, _PRELUDE.size + length)
    ropes = tuple(_rope(rope) for rope in header.ropes)
    planes = tuple(_plane(plane, len(ropes), take) for plane in header.planes)
    if len({(p.layer, p.role) for p in planes}) != len(planes):
        raise _fail("has a plane twice")
    tables = take("u1", (header.tables, 32))
    if (tables.sum(1, dtype=np.int64) != 256).any() or ((tables > 0).sum(1) < 2).any():
        raise _fail("has a table that is no distribution")
    if not tables[:, 31].all():
        # Where a cell has fewer than 64 tokens, a step holds components of several tables: all must know an escape.
        raise _fail("has a table without an escape")
    sizes = [len(group.forward) for plane in planes for group in plane.groups]
    levels: list[CardLevel] = []
    for level in header.levels:
        levels.append(_level(level, sizes, header.tables, {lv.info.name: lv for lv in levels}, take))
    if take.at != len(view):
        raise _fail("has bytes left over")
    if any(a.info.name == b.info.name for a, b in pairwise(sorted(levels, key=lambda lv: lv.info.name))):
        raise _fail("has a level twice")
    return Card(header.model, ropes, planes, tables, tuple(levels), header.notes)


class _Taker:
    """Reads arrays one after the other; FormatError where the bytes end too early."""

    def __init__(self, view: memoryview, at: int) -> None:
        self.view, self.at = view, at

    def __call__(self, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        kind = np.dtype("<" + dtype)
        count = int(np.prod(shape, dtype=object))
        end = self.at + count * kind.itemsize
        if end > len(self.view):
            raise _fail("is cut off")
        array = np.frombuffer(self.view, kind, count, self.at).reshape(shape)
        self.at = end
        if kind.kind == "f" and not np.isfinite(array).all():
            raise _fail("has a number that is not finite")
        return array if array.flags.aligned else array.copy()  # kernels read vectors of whole numbers


def _rope(rope: _Rope) -> Rope:
    frequencies = np.array(rope.inv_freq, np.float64)
    good = np.isfinite(frequencies).all() and 0 < rope.scale < 1e6
    if not good or len(frequencies) > 4096 or (rope.style == "none") != (len(frequencies) == 0):
        raise _fail(f"has a rotation of style {rope.style[:16]!r}")
    return Rope(rope.style, frequencies, rope.scale)


def _plane(plane: _Plane, ropes: int, take: _Taker) -> PlaneCard:
    good = 0 <= plane.layer < 1 << 16 and 0 < plane.heads <= 4096 and 0 < plane.dim <= 4096
    if not good or not -1 <= plane.rope < ropes:
        raise _fail(f"has a plane {plane.role[:8]!r} of layer {plane.layer}")
    groups, head = [], 0
    for group in plane.groups:
        channels = group.heads * plane.dim
        if group.first != head or group.heads <= 0 or channels > 4096 or not 0 <= group.components <= channels:
            raise _fail(f"has a group of {group.heads} heads from {group.first} in a plane of {plane.heads}")
        if not isfinite(group.log_rms) or abs(group.log_rms) > 100:
            raise _fail("has a scale out of range")
        head += group.heads
        mean, gain = take("f4", (channels,)), take("f4", (channels,))
        forward, basis = take("f4", (group.components, channels)), take("i2", (group.components, channels))
        if basis.size and (basis.min() < -_MAX_BASIS or basis.max() > _MAX_BASIS):
            raise _fail("has a basis out of range")
        groups.append(ChannelGroup(group.first, group.heads, group.log_rms, mean, gain, forward, basis))
    if head != plane.heads:
        raise _fail(f"covers {head} of {plane.heads} heads")
    return PlaneCard(plane.layer, plane.role, plane.heads, plane.dim, plane.rope, tuple(groups))


def _level(level: _Level, sizes: list[int], tables: int, before: dict[str, CardLevel], take: _Taker) -> CardLevel:
    info = level.info
    parse_level(f"{info.name}@{'0' * 16}")
    if len(level.active) != len(sizes) or len(level.refined) != len(sizes):
        raise _fail(f"has {len(level.active)} codings in level {info.name} for {len(sizes)} groups")
    base = before.get(info.base)
    if bool(info.base) != (base is not None) or not isfinite(level.step) or not 0 < level.step < 1e30:
        raise _fail(f"has level {info.name} of step {level.step} over {info.base!r}")
    if base is not None and np.float32(base.step) != np.float32(3) * np.float32(level.step):
        raise _fail(f"refines {info.base} by a step that is no third of it")
    codings = []
    for i, (active, refined) in enumerate(zip(level.active, level.refined)):
        expected = 0 if base is None else len(base.codings[i].table)
        if not 0 <= active <= sizes[i] or refined != expected or refined > active:
            raise _fail(f"codes {active} of {sizes[i]} components in level {info.name}")
        coding = Coding(take("u1", (active,)), take("u1", (active,)), take("u1", (refined,)))
        indices = np.concatenate([coding.table, coding.refine])
        if (indices >= tables).any() or (coding.shift > _MAX_SHIFT).any():
            raise _fail(f"names a table or shift that is not there in level {info.name}")
        codings.append(coding)
    return CardLevel(info, level.step, tuple(codings))
