"""The bytes of a block or state, alike on disk and on the wire.

::

    offset  size  field (all integers little-endian)
    0       8     magic "CTXRBLK\\0"
    8       2     version (1)
    10      2     flags, 0
    12      4     header length h
    16      8     total length, padding included
    24      8     xxh3-64 of the header bytes, seeded with the low 32 bits of the total length
    32      h     header: MessagePack array, see Header; at most 1 MiB
    ...           zeros up to the first plane
    planes        each at a multiple of 64 bytes (of 8 if uint8: a coded stream), in layer order, K before V, so
                  that a layer is read and checked alone; of a joint level the stream of several layers
                  stands in the first of their planes, and the others are empty
    ...           zeros up to the total length

A **block** holds K and V of a run of tokens for the layers that keep all tokens: planes ``k`` and ``v`` of shape
[heads, tokens, dim]. A **state** holds what is valid at one position only: ``k``/``v`` of a sliding window (the last
``tokens`` positions before ``end``), and ``conv0``, ``recurrent0``, … of linear layers with the layer's own shape. K is
stored as the engine keeps it: rotated at each token's own position (``rope_at`` = position of the first token) or not
at all (-1).

Padding rounds the total to ``k * 4096 - 16`` bytes: LMDB puts a 16-byte header before a large value, so a value of
exact pages would waste one page each. The parser trusts no number before it has checked it; each plane has its xxh3-64,
compared when the plane is read.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cached_property, lru_cache
from itertools import groupby
from math import prod
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ctxreuse.dtypes import ITEM_BYTES
from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import KEY_BYTES, Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = [
    "MAX_HEADER",
    "MAX_PLANES",
    "VERSION",
    "BlockView",
    "BlockWriter",
    "Buffer",
    "Header",
    "Kind",
    "Layout",
    "Plane",
    "block_layout",
    "layout_of",
    "parse",
    "rekey",
    "reseal",
    "rewriter",
]

_Bytes: TypeAlias = npt.NDArray[np.uint8]
MAGIC = b"CTXRBLK\0"
VERSION = 1
MAX_HEADER = 1 << 20
MAX_PLANES = 8192
MAX_TOKENS = 4096
MAX_TOTAL = 1 << 34
ALIGN, CODED_ALIGN = 64, 8
_PRELUDE = struct.Struct("<8sHHIQQ")
_PAGE, _LMDB_PAGE_HEADER = 4096, 16

#: What a sealed block may lie in.
Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
#: A block covers a run of tokens, a state is valid at one position only.
Kind: TypeAlias = Literal["block", "state"]


class Plane(NamedTuple):
    """One plane: its layer, role (``k``, ``v``, ``conv0``, …), numeric type and row-major shape."""

    layer: int
    role: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a block says about itself.

    ``tokens`` are the ids it covers (int32 little-endian) and ``end`` the position after the last. ``planes``
    is the layout (MessagePack list of planes, equal in all blocks of a space, so it is parsed once) and ``checksums``
    one xxh3-64 a plane. ``extra`` holds an engine's small whole numbers.
    """

    kind: Kind
    space: bytes
    key: bytes
    parent: bytes
    end: int
    tokens: bytes
    level: str
    rope_at: int
    planes: bytes
    checksums: bytes
    extra: dict[str, int] = {}


_header_decoder = msgspec.msgpack.Decoder(Header)
_planes_decoder = msgspec.msgpack.Decoder(tuple[Plane, ...])
_encode = msgspec.msgpack.encode
# msgspec lets the UnicodeDecodeError of a malformed string through as it is.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _aligned(n: int, to: int = ALIGN) -> int:
    return -(-n // to) * to


class Layout:
    """The planes of a block and their offsets from the first plane; immutable, shared by all blocks that look alike."""

    def __init__(self, planes: tuple[Plane, ...]) -> None:
        self.planes = planes
        self.index = {(plane.layer, plane.role): i for i, plane in enumerate(planes)}
        self.offsets, self.sizes, at = [], [plane.nbytes for plane in planes], 0
        for plane, size in zip(planes, self.sizes):
            # Coded streams are short and read in order: 64 would pad a plane at 1 bit a value by 2 %.
            at = _aligned(at, CODED_ALIGN if plane.dtype == "uint8" else ALIGN)
            self.offsets.append(at)
            at += size
        self.nbytes = _aligned(at)

    @cached_property
    def spans(self) -> npt.NDArray[np.int64]:
        """Offset and size of each plane, [planes, 2]."""
        return np.array([self.offsets, self.sizes], np.int64).T.copy()

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Offsets of the first plane of each run of planes of one layer."""
        runs = groupby(zip(self.offsets, self.planes), lambda one: one[1].layer)
        return tuple(next(run)[0] for _, run in runs)

    @cached_property
    def part_of(self) -> dict[int, int]:
        """Numbers of the parts that layers are sent in, from 1: the head is part 0."""
        return {layer: 1 + i for i, (layer, _) in enumerate(groupby(plane.layer for plane in self.planes))}

    @cached_property
    def encoded(self) -> bytes:
        """The canonical bytes that stand in the header."""
        return _encode(self.planes)


def layout_of_header(header: Header) -> Layout:
    """The layout that a header names. Raises FormatError if it is malformed."""
    return _layout(header.planes)


# A layout from hostile bytes may take some megabytes (8,192 planes): few are kept, and a model needs two or three.
@lru_cache(maxsize=32)
def _layout(raw: bytes) -> Layout:
    try:
        planes = _planes_decoder.decode(raw)
    except _UNREADABLE as error:
        raise FormatError(f"block layout is malformed: {error}") from None
    if not 0 < len(planes) <= MAX_PLANES:
        raise FormatError(f"block with {len(planes)} planes")
    for plane in planes:
        if plane.dtype not in ITEM_BYTES or len(plane.role) > 32 or not 0 <= plane.layer < 1 << 16:
            raise FormatError(f"plane {plane.role[:32]!r} of layer {plane.layer} and type {plane.dtype[:16]!r}")
        if len(plane.shape) > 8 or any(not 0 <= n <= MAX_TOTAL for n in plane.shape) or plane.nbytes > MAX_TOTAL:
            raise FormatError(f"plane of shape {plane.shape[:8]}")
    layout = Layout(planes)
    if len(layout.index) != len(planes):
        raise FormatError("a plane is there twice")
    return layout


@lru_cache(maxsize=256)
def layout_of(planes: tuple[Plane, ...]) -> Layout:
    """The layout of these planes; made once for each tuple."""
    return Layout(planes)


#: A model whose layers keep states only has no K/V to put in a block; the format wants one plane.
_EMPTY = Plane(0, "empty", "uint8", (0,))


@lru_cache(maxsize=64)
def block_layout(space: ModelSpace, tokens: int = 0) -> Layout:
    """The planes of a block of this space: k and v [heads, tokens, dim] of every layer that keeps all tokens.

    ``tokens``: of a partial block; 0: as many as a whole one has.
    """
    planes = [
        Plane(layer, role, space.dtype, (spec.kv_heads, tokens or space.block_tokens, dim))
        for layer, spec in enumerate(space.layers)
        if spec.blocked
        for role, dim in (("k", spec.k_dim), ("v", spec.v_dim))
    ]
    return layout_of(tuple(planes) or (_EMPTY,))


class BlockWriter:
    """Lays out a block in one buffer; planes are filled in place, then ``seal`` makes it a value.

    Not thread-safe. ``buffer`` (uint8 [total bytes]) is new memory, or ``into`` if that has at least the size, so that
    a caller who exports many blocks faults its pages once.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        kind: Kind,
        space: bytes,
        key: bytes,
        parent: bytes,
        end: int,
        tokens: Tokens,
        level: str = "exact",
        rope_at: int = -1,
        extra: dict[str, int] | None = None,
        into: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        self.layout = layout
        ids = np.ascontiguousarray(tokens, "<i4").tobytes()
        blank = bytes(8 * len(layout.planes))
        fields = (kind, space, key, parent, end, ids, level, rope_at, layout.encoded)
        self._header = Header(*fields, blank, extra or {})
        # Checksums have a fixed width, so the header's length is known before they are.
        self._start = _aligned(_PRELUDE.size + len(_encode(self._header)))
        body = self._start + layout.nbytes
        total = -(-(body + _LMDB_PAGE_HEADER) // _PAGE) * _PAGE - _LMDB_PAGE_HEADER
        self.buffer = np.empty(total, np.uint8) if into is None or into.nbytes < total else into[:total]
        self.buffer[: self._start] = 0
        self.buffer[body:] = 0

    @property
    def start(self) -> int:
        """Byte offset of the first plane in ``buffer``."""
        return self._start

    def offset(self, layer: int, role: str) -> int:
        """Byte offset of a plane in ``buffer``."""
        return self._start + self.layout.offsets[self.layout.index[layer, role]]

    def plane(self, layer: int, role: str) -> npt.NDArray[np.uint8]:
        """A writable view [nbytes] of one plane."""
        at = self.offset(layer, role)
        return self.buffer[at : at + self.layout.sizes[self.layout.index[layer, role]]]

    def seal(self) -> npt.NDArray[np.uint8]:
        """Compute the checksums, write the header, return the finished bytes (the buffer itself, not a copy)."""
        layout, buffer, start = self.layout, self.buffer, self._start
        data, sums = buffer.data, []
        for at, size, following in zip(layout.offsets, layout.sizes, (*layout.offsets[1:], layout.nbytes)):
            if at + size != following:
                buffer[start + at + size : start + following] = 0
            sums.append(xxhash.xxh3_64_intdigest(data[start + at : start + at + size]))
        header = _encode(msgspec.structs.replace(self._header, checksums=np.array(sums, "<u8").tobytes()))
        check = xxhash.xxh3_64_intdigest(header, buffer.nbytes & 0xFFFFFFFF)
        prelude = _PRELUDE.pack(MAGIC, VERSION, 0, len(header), buffer.nbytes, check)
        buffer[: _PRELUDE.size + len(header)] = np.frombuffer(prelude + header, np.uint8)
        return buffer


class BlockView:
    """A parsed block over the caller's buffer, valid as long as that buffer is. Safe for concurrent readers."""

    __slots__ = ("__weakref__", "_spans", "_start", "_sums", "buffer", "header", "layout")

    def __init__(self, header: Header, layout: Layout, start: int, buffer: memoryview) -> None:
        self.header, self.layout, self.buffer, self._start = header, layout, buffer, start
        self._sums: list[int] = np.frombuffer(header.checksums, "<u8").tolist()
        self._spans: npt.NDArray[np.int64] | None = None

    @property
    def tokens(self) -> Tokens:
        """Token ids [n], int32."""
        return np.frombuffer(self.header.tokens, "<i4")

    @property
    def start(self) -> int:
        """Byte offset of the first plane: the length of the head."""
        return self._start

    def covers(self, key: bytes, tokens: Tokens) -> bool:
        """True if this is the block of ``key`` and its token ids are these: the proof behind a hash hit."""
        return self.header.key == key and self.header.tokens == tokens.tobytes()

    def offset(self, layer: int, role: str) -> int:
        """Byte offset of a plane in ``buffer``; KeyError if the block has no such plane."""
        return self._start + self.layout.offsets[self.layout.index[layer, role]]

    def checksum(self, layer: int, role: str) -> int:
        """The XXH3-64 that a plane's bytes must have; KeyError if the block has no such plane."""
        return self._sums[self.layout.index[layer, role]]

    @property
    def checksums(self) -> npt.NDArray[np.uint64]:
        """The XXH3-64 of the bytes of each plane of the layout."""
        return np.frombuffer(self.header.checksums, "<u8")

    @property
    def spans(self) -> npt.NDArray[np.int64]:
        """Byte offset in ``buffer`` and size of each plane of the layout, [planes, 2], of a block that is all there."""
        if self._spans is None:
            self._spans = self.layout.spans + np.array([self._start, 0])
        return self._spans

    def plane(self, layer: int, role: str, *, verify: bool = True) -> memoryview:
        """The bytes of one plane, zero-copy; raises FormatError if it is missing or its checksum differs."""
        i = self.layout.index.get((layer, role))
        if i is None:
            raise FormatError(f"block has no plane {role!r} of layer {layer}", where=self.header.key.hex()[:16])
        at = self.offset(layer, role)
        data = self.buffer[at : at + self.layout.sizes[i]]
        if verify and xxhash.xxh3_64_intdigest(data) != self._sums[i]:
            raise FormatError(
                f"plane {role!r} of layer {layer} is corrupt", where=self.header.key.hex()[:16], fix="It is recomputed"
            )
        return data

    def array(self, layer: int, role: str, *, verify: bool = True) -> npt.NDArray[np.generic]:
        """One plane as an array of its shape, zero-copy; bfloat16 comes as its bits in uint16."""
        data = self.plane(layer, role, verify=verify)
        plane = self.layout.planes[self.layout.index[layer, role]]
        dtype = "uint16" if plane.dtype == "bfloat16" else plane.dtype
        return np.frombuffer(data, np.dtype(dtype)).reshape(plane.shape)

    def verify(self) -> None:
        """Compare the checksum of every plane; raises FormatError at the first that differs."""
        for plane in self.layout.planes:
            self.plane(plane.layer, plane.role)


def parse(data: bytes | bytearray | memoryview | npt.NDArray[np.uint8], *, space: bytes | None = None) -> BlockView:
    """Read a block's header, checking every number against the buffer; planes are checked when read.

    ``space``: the digest that the block must belong to. Raises FormatError with the reason; never reads out of bounds.
    About 10 µs for 60 planes once their layout has been seen.
    """
    view = (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B").toreadonly()
    if len(view) < _PRELUDE.size:
        raise FormatError(f"{len(view)} bytes are too few for a block")
    magic, version, flags, header_len, total, check = _PRELUDE.unpack_from(view)
    if magic != MAGIC:
        raise FormatError("bytes are not a ctxreuse block", where=f"magic {bytes(magic)!r}")
    if version != VERSION or flags:
        age = "newer" if version > VERSION or flags else "older"
        raise FormatError(f"block has {age} format {version}.{flags}, this is {VERSION}.0", fix="It is recomputed")
    if total != len(view) or total > MAX_TOTAL:
        raise FormatError(f"block says {total} bytes and has {len(view)}")
    if not 0 < header_len <= min(MAX_HEADER, total - _PRELUDE.size):
        raise FormatError(f"header of {header_len} bytes in a block of {total}")
    raw = view[_PRELUDE.size : _PRELUDE.size + header_len]
    if xxhash.xxh3_64_intdigest(raw, total & 0xFFFFFFFF) != check:
        raise FormatError("block header is corrupt")
    try:
        header = _header_decoder.decode(raw)
    except _UNREADABLE as error:
        raise FormatError(f"block header is malformed: {error}") from None
    if not len(header.space) == len(header.key) == len(header.parent) == KEY_BYTES:
        raise FormatError("space, key and parent must have 32 bytes each")
    count = len(header.tokens) // 4
    if len(header.tokens) % 4 or not 0 < count <= MAX_TOKENS or not count <= header.end < 1 << 40:
        raise FormatError(f"block of {len(header.tokens)} token bytes ends at position {header.end}")
    if len(header.level) > 64 or not -1 <= header.rope_at < 1 << 40 or len(header.extra) > MAX_PLANES:
        raise FormatError(f"block of level {header.level[:64]!r}, rotated at {header.rope_at}")
    layout = _layout(header.planes)
    start = _aligned(_PRELUDE.size + header_len)
    # Offsets only grow, so the last plane ends last; its padding may be cut off.
    end = start + layout.offsets[-1] + layout.planes[-1].nbytes
    if len(header.checksums) != 8 * len(layout.planes) or end > total:
        raise FormatError(f"planes of {layout.nbytes} bytes do not fit a block of {total}")
    if space is not None and header.space != space:
        raise FormatError("block belongs to another model space", where=header.space.hex()[:16])
    return BlockView(header, layout, start, view)


def rewriter(
    view: BlockView, *, layout: Layout | None = None, level: str | None = None, into: _Bytes | None = None
) -> BlockWriter:
    """A writer of the same identity, tokens and place; its planes hold nothing yet. See reseal for the arguments."""
    head = view.header
    return BlockWriter(
        layout or view.layout, kind=head.kind, space=head.space, key=head.key, parent=head.parent, end=head.end,
        tokens=view.tokens, level=head.level if level is None else level, rope_at=head.rope_at, extra=head.extra,
        into=into,
    )  # fmt: skip


def reseal(
    view: BlockView,
    planes: Mapping[tuple[int, str], bytes | memoryview | _Bytes],
    *,
    layout: Layout | None = None,
    level: str | None = None,
    into: _Bytes | None = None,
) -> _Bytes:
    """A block of the same identity, tokens and place with other bytes in ``planes`` [layer, role], as a copy.

    ``layout`` and ``level``: as the view's unless given. Planes that are not named are copied, and then their checksums
    are compared: FormatError for a damaged one. ``into``: see BlockWriter.
    """
    writer = rewriter(view, layout=layout, level=level, into=into)
    target = writer.buffer.data
    for at, (offset, size) in zip(writer.layout.index, (writer.layout.spans + np.array([writer.start, 0])).tolist()):
        data = planes[at] if at in planes else view.plane(*at)
        if size:
            target[offset : offset + size] = memoryview(data).cast("B")  # type: ignore[arg-type]
    return writer.seal()


def rekey(
    data: bytes | bytearray | memoryview | _Bytes, key: bytes, parent: bytes, into: _Bytes | None = None
) -> _Bytes:
    """The same block under other keys, as a copy: a new head of the same length, planes and checksums untouched.

    ``into``: memory for the copy if it has at least the size. Raises FormatError if ``data`` is no block.
    """
    view = parse(data)
    total = len(view.buffer)
    copy = np.empty(total, np.uint8) if into is None or into.nbytes < total else into[:total]
    copy[:] = np.frombuffer(view.buffer, np.uint8)
    header = _encode(msgspec.structs.replace(view.header, key=key, parent=parent))
    # Keys have a fixed size, but another writer may have encoded its header less tightly than we do.
    if len(key) != KEY_BYTES or len(parent) != KEY_BYTES or _aligned(_PRELUDE.size + len(header)) != view.start:
        raise FormatError("block cannot be given another key", where=view.header.key.hex()[:16])
    check = xxhash.xxh3_64_intdigest(header, total & 0xFFFFFFFF)
    copy[: view.start] = 0
    head = _PRELUDE.pack(MAGIC, VERSION, 0, len(header), total, check) + header
    copy[: len(head)] = np.frombuffer(head, np.uint8)
    return copy
