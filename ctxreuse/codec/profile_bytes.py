"""Calibration profiles as bytes: written once, parsed as hostile input, since a profile may come from a peer.

::

    offset  size  field (little-endian)
    0       8     magic "CTXRCARD"
    8       4     version (1 to 3)
    12      4     header length h
    16      h     header: MessagePack, see _Header
    ...           arrays without padding: per group mean, gain, forward, basis; per group of joint planes mean, gain,
                  rows, exponents, basis, tail; tables; per level and group table, shift, refine
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite, prod
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.block.levels import LevelInfo, is_joint, parse_level
from ctxreuse.codec.profile import (
    MOST_CHANNELS,
    ChannelGroup,
    CodecProfile,
    Coding,
    JointGroup,
    JointProfile,
    KindFigures,
    PlanePart,
    PlaneProfile,
    ProfileLevel,
)
from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import KEY_BYTES
from ctxreuse.rope import Rotary, RotaryStyle

__all__ = ["MAX_PROFILE", "profile_digest", "read_profile", "write_profile"]

MAGIC, VERSIONS = b"CTXRCARD", (1, 2, 3)
MAX_PROFILE = 1 << 30
_PRELUDE = struct.Struct("<8sII")
_MAX_SHIFT, _MAX_BASIS, _MAX_SEEN, _MAX_EXPONENT = 8, 8191, 1 << 20, 200


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


class _JointGroup(_Group, array_like=True, frozen=True):
    wide: int


class _Joint(msgspec.Struct, array_like=True, frozen=True):
    parts: tuple[PlanePart, ...]
    heads: int
    dim: int
    groups: tuple[_JointGroup, ...]


class _Rope(msgspec.Struct, array_like=True, frozen=True):
    style: RotaryStyle
    scale: float
    inv_freq: tuple[float, ...]


class _Level(msgspec.Struct, array_like=True, frozen=True):
    info: LevelInfo
    step: float
    active: tuple[int, ...]
    refined: tuple[int, ...]
    narrow: tuple[int, ...] = ()  # of version 2


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """``kinds``, ``seen`` and ``unseen`` are written if they say anything; 0.1.0 does not know them.

    ``joint``: of version 3.
    """

    model: bytes
    ropes: tuple[_Rope, ...]
    planes: tuple[_Plane, ...]
    tables: int
    levels: tuple[_Level, ...]
    notes: dict[str, str]
    kinds: tuple[dict[str, KindFigures], ...] = ()
    seen: bytes = b""
    unseen: float = 1.0
    joint: tuple[_Joint, ...] = ()


_OPTIONAL = 4


def profile_digest(data: bytes | bytearray | memoryview) -> bytes:
    """SHA-256 of a profile's bytes: its name."""
    return hashlib.sha256(data).digest()


def write_profile(profile: CodecProfile) -> bytes:
    """Return the bytes of a profile; equal profiles give equal bytes. FormatError if they could not be read back."""
    planes = tuple(map(_plane_head, profile.planes))
    joint = tuple(
        _Joint(
            plane.parts, plane.heads, plane.dim,
            tuple(_JointGroup(g.first, g.heads, len(g.rows), float(g.log_rms), len(g.basis)) for g in plane.groups),
        )
        for plane in profile.joint
    )  # fmt: skip
    ropes = tuple(_Rope(r.style, float(r.scale), r.inv_freq) for r in profile.ropes)
    levels = tuple(
        _Level(
            level.info,
            float(np.float32(level.step)),
            tuple(len(c.table) for c in level.codings),
            tuple(len(c.refine) for c in level.codings),
            tuple(min(c.narrow, len(c.table)) for c in level.codings) if profile.version > 1 else (),
        )
        for level in profile.levels
    )
    written: tuple[Any, ...] = levels
    if profile.version == 1:
        written = tuple(msgspec.structs.astuple(level)[:-1] for level in levels)
    fields = msgspec.structs.astuple(
        _Header(
            profile.model, ropes, planes, len(profile.tables), written, dict(sorted(profile.notes.items())),
            tuple(level.kinds for level in profile.levels), profile.seen, profile.unseen, joint,
        )
    )  # fmt: skip
    if profile.version < 3:
        plain = not profile.seen and not any(level.kinds for level in profile.levels)
        fields = fields[:-_OPTIONAL] if plain else fields[:-1]
    header = msgspec.msgpack.encode(fields)
    parts = [_PRELUDE.pack(MAGIC, profile.version, len(header)), header]
    for group in (g for p in profile.planes for g in p.groups):
        parts += [np.ascontiguousarray(a, "<f4").tobytes() for a in (group.mean, group.gain, group.forward)]
        parts.append(np.ascontiguousarray(group.basis, "<i2").tobytes())
    for own in (g for p in profile.joint for g in p.groups):
        arrays = (own.mean, "<f4"), (own.gain, "<f4"), (own.rows, "<i2"), (own.exponents, "<i4"), (own.basis, "<i2")
        parts += [np.ascontiguousarray(array, kind).tobytes() for array, kind in arrays]
        parts.append(np.ascontiguousarray(own.tail, np.int8).tobytes())
    parts.append(np.ascontiguousarray(profile.tables, np.uint8).tobytes())
    parts += [
        a.astype(np.uint8).tobytes() for lv in profile.levels for c in lv.codings for a in (c.table, c.shift, c.refine)
    ]
    data = b"".join(parts)
    read_profile(data)
    return data


def _plane_head(p: PlaneProfile) -> _Plane:
    groups = tuple(_Group(g.first, g.heads, len(g.forward), float(g.log_rms)) for g in p.groups)
    return _Plane(p.layer, p.role, p.heads, p.dim, p.rope, groups)


def read_profile(data: bytes | bytearray | memoryview) -> CodecProfile:
    """Parse a profile. Raises FormatError with the reason. Arrays are read-only views of ``data``."""
    try:
        return _read(memoryview(data).toreadonly())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"profile header is malformed: {error}") from None


def _fail(what: str) -> FormatError:
    return FormatError(f"profile {what}", fix="Calibrate again, or fetch the profile again")


def _read(view: memoryview) -> CodecProfile:
    if len(view) < _PRELUDE.size or len(view) > MAX_PROFILE:
        raise _fail(f"of {len(view)} bytes")
    magic, version, length = _PRELUDE.unpack_from(view)
    if magic != MAGIC or version not in VERSIONS:
        raise _fail(f"has magic {bytes(magic)!r} and version {version}, this reads versions up to {VERSIONS[-1]}")
    if length > len(view) - _PRELUDE.size:
        raise _fail("is cut off")
    header = msgspec.msgpack.decode(view[_PRELUDE.size : _PRELUDE.size + length], type=_Header)
    if len(header.model) != KEY_BYTES or not 0 < header.tables <= 256 or not header.planes or len(header.levels) > 32:
        raise _fail("has impossible counts")
    take = _Taker(view, _PRELUDE.size + length)
    ropes = tuple(_rope(rope) for rope in header.ropes)
    planes = tuple(_plane(plane, len(ropes), take) for plane in header.planes)
    joint = tuple(_joint(one, len(ropes), take) for one in header.joint)
    if len({(p.layer, p.role) for p in planes}) != len(planes):
        raise _fail("has a plane twice")
    alone, coded = ({p.place: (x.heads, x.dim) for x in some for p in x.parts} for some in (planes, joint))
    if joint and (version < 3 or alone != coded or len(coded) != sum(len(x.parts) for x in joint)):
        raise _fail("has joint planes that are not its planes")
    tables = take("u1", (header.tables, 32))
    if (tables.sum(1, dtype=np.int64) != 256).any() or ((tables > 0).sum(1) < 2).any():
        raise _fail("has a table that is no distribution")
    if not tables[:, 31].all():
        # Where a cell has fewer than 64 tokens, a step holds components of several tables: all must know an escape.
        raise _fail("has a table without an escape")
    sizes = [
        [len(group.forward) for plane in planes for group in plane.groups],
        [len(group.rows) for plane in joint for group in plane.groups],
    ]
    levels: list[ProfileLevel] = []
    for level in header.levels:
        together = is_joint(level.info.name)
        if together and not joint:
            raise _fail(f"has level {level.info.name} without joint planes")
        levels.append(_level(level, sizes[together], header.tables, {lv.info.name: lv for lv in levels}, take, version))
    if take.at != len(view):
        raise _fail("has bytes left over")
    if header.kinds and len(header.kinds) != len(levels):
        raise _fail(f"has kinds of {len(header.kinds)} of {len(levels)} levels")
    if len(header.seen) > _MAX_SEEN or not 0 <= header.unseen <= 1:
        raise _fail(f"has {len(header.seen)} bytes of token ids and a share of {header.unseen}")
    figures = [f for kinds in header.kinds for kind in kinds.values() for f in (kind.kl, kind.bits)]
    if not all(isfinite(f) and f >= 0 for f in figures):
        raise _fail("has figures of a kind that are out of range")
    if header.kinds:
        levels = [msgspec.structs.replace(level, kinds=kinds) for level, kinds in zip(levels, header.kinds)]
    if any(a.info.name == b.info.name for a, b in pairwise(sorted(levels, key=lambda lv: lv.info.name))):
        raise _fail("has a level twice")
    return CodecProfile(
        header.model, ropes, planes, tables, tuple(levels), header.notes, header.seen, header.unseen, version, joint
    )


class _Taker:
    """Reads arrays in sequence; FormatError where the bytes end too early."""

    def __init__(self, view: memoryview, at: int) -> None:
        self.view, self.at = view, at

    def __call__(self, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        kind = np.dtype("<" + dtype)
        count = prod(shape)
        end = self.at + count * kind.itemsize
        if end > len(self.view):
            raise _fail("is cut off")
        array = np.frombuffer(self.view, kind, count, self.at).reshape(shape)
        self.at = end
        if kind.kind == "f" and not np.isfinite(array).all():
            raise _fail("has a number that is not finite")
        return array if array.flags.aligned else array.copy()  # kernels read vectors of whole numbers


def _rope(rope: _Rope) -> Rotary:
    good = all(map(isfinite, rope.inv_freq)) and 0 < rope.scale < 1e6
    if not good or len(rope.inv_freq) > 4096 or (rope.style == "none") != (not rope.inv_freq):
        raise _fail(f"has a rotation of style {rope.style[:16]!r}")
    return Rotary(rope.style, rope.inv_freq, rope.scale)


def _plane(plane: _Plane, ropes: int, take: _Taker) -> PlaneProfile:
    _check_plane(plane.heads, plane.dim, [PlanePart(plane.layer, plane.role, plane.rope)], ropes)
    groups = []
    for group, channels in _in_order(plane.groups, plane.heads, plane.dim):
        mean, gain = take("f4", (channels,)), take("f4", (channels,))
        forward, basis = take("f4", (group.components, channels)), take("i2", (group.components, channels))
        _check_basis(basis, _MAX_BASIS)
        groups.append(ChannelGroup(group.first, group.heads, group.log_rms, mean, gain, forward, basis))
    return PlaneProfile(plane.layer, plane.role, plane.heads, plane.dim, plane.rope, tuple(groups))


def _joint(plane: _Joint, ropes: int, take: _Taker) -> JointProfile:
    _check_plane(plane.heads, plane.dim, plane.parts, ropes)
    groups = []
    for group, channels in _in_order(plane.groups, plane.heads, plane.dim * len(plane.parts)):
        n, wide = group.components, group.wide
        if not 0 <= wide <= n:
            raise _fail(f"has {wide} of {n} components in full")
        mean, gain = take("f4", (channels,)), take("f4", (channels,))
        rows, exponents = take("i2", (n, channels)), take("i4", (n,))
        basis, tail = take("i2", (wide, channels)), take("i1", (n - wide, channels))
        _check_basis(basis, _MAX_BASIS)
        _check_basis(tail, _MAX_BASIS // 64)
        if np.abs(exponents.astype(np.int64)).max(initial=0) > _MAX_EXPONENT:
            raise _fail("has an exponent out of range")
        groups.append(JointGroup(group.first, group.heads, group.log_rms, mean, gain, rows, exponents, basis, tail))
    return JointProfile(plane.parts, plane.heads, plane.dim, tuple(groups))


def _check_plane(heads: int, dim: int, parts: Sequence[PlanePart], ropes: int) -> None:
    good = 0 < heads <= 4096 and 0 < dim <= 4096 and 0 < len(parts) <= MOST_CHANNELS
    if not good or not all(0 <= part.layer < 1 << 16 and -1 <= part.rope < ropes for part in parts):
        raise _fail(f"has a plane of {heads} heads of {dim} in layers {[part.layer for part in parts[:8]]}")


G = TypeVar("G", bound=_Group)


def _in_order(groups: Sequence[G], heads: int, width: int) -> Iterator[tuple[G, int]]:
    """Groups with their channels, ``width`` a head; FormatError unless they cover all heads in order."""
    head = 0
    for group in groups:
        channels = group.heads * width
        if group.first != head or group.heads <= 0 or channels > MOST_CHANNELS or not 0 <= group.components <= channels:
            raise _fail(f"has a group of {group.heads} heads from {group.first} in a plane of {heads}")
        if not isfinite(group.log_rms) or abs(group.log_rms) > 100:
            raise _fail("has a scale out of range")
        head += group.heads
        yield group, channels
    if head != heads:
        raise _fail(f"covers {head} of {heads} heads")


def _check_basis(basis: npt.NDArray[Any], most: int) -> None:
    if basis.size and (basis.min() < -most or basis.max() > most):
        raise _fail("has a basis out of range")


def _level(
    level: _Level, sizes: list[int], tables: int, before: dict[str, ProfileLevel], take: _Taker, version: int
) -> ProfileLevel:
    info = level.info
    parse_level(f"{info.name}@{'0' * 16}")
    narrow = level.narrow if version > 1 else (MOST_CHANNELS,) * len(sizes)
    if (
        any(len(numbers) != len(sizes) for numbers in (level.active, level.refined, narrow))
        or min(narrow, default=0) < 0
    ):
        raise _fail(f"has {len(level.active)} codings in level {info.name} for {len(sizes)} groups")
    base = before.get(info.base)
    if base is not None and base.joint != is_joint(info.name):
        raise _fail(f"has level {info.name} that refines {info.base}")
    if bool(info.base) != (base is not None) or not isfinite(level.step) or not 0 < level.step < 1e30:
        raise _fail(f"has level {info.name} of step {level.step} over {info.base!r}")
    if base is not None and np.float32(base.step) != np.float32(3) * np.float32(level.step):
        raise _fail(f"refines {info.base} by a step that is no third of it")
    codings = []
    for i, (active, refined) in enumerate(zip(level.active, level.refined)):
        expected = 0 if base is None else len(base.codings[i].table)
        if not 0 <= active <= sizes[i] or refined != expected or refined > active:
            raise _fail(f"codes {active} of {sizes[i]} components in level {info.name}")
        coding = Coding(take("u1", (active,)), take("u1", (active,)), take("u1", (refined,)), narrow[i])
        indices = np.concatenate([coding.table, coding.refine])
        if (indices >= tables).any() or (coding.shift > _MAX_SHIFT).any():
            raise _fail(f"names a table or shift that is not there in level {info.name}")
        codings.append(coding)
    return ProfileLevel(info, level.step, tuple(codings))
