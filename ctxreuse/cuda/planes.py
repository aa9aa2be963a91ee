"""Coded planes (`ctxreuse.codec`) decoded on a device, straight into an engine's paged cache.

`DeviceCard` holds a card's transforms for one level in device memory. `decode_to_pages` takes coded streams of any
layers, roles and lengths and decodes them in one launch, a warp for each 64 tokens of a channel group; keys are rotated
for their positions. The numbers are those of the CPU's decoder, bit for bit.

Streams are hostile: lengths are checked on the host before anything is queued, contents on the device. A corrupt stream
raises FormatError; cells of it that are sound may have been written by then, other streams are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ctxreuse.codec.card import Card, PlaneCard
from ctxreuse.codec.planes import raw_type, rope_tables
from ctxreuse.cuda.cells import Parsed, parse, parse_refinement
from ctxreuse.cuda.launch import Launcher
from ctxreuse.cuda.layout import CELL, GROUP, PLANE, Book
from ctxreuse.cuda.rans import TABLE, codes_of, on_host, tables_of
from ctxreuse.errors import FormatError

__all__ = ["CodedPlane", "Decoding", "DeviceCard", "Pages", "decode_planes", "decode_to_pages"]

TYPES: Final = {"float32": 0, "float16": 1, "bfloat16": 2}
_WARP, _OWN = 32, 1280
_PAGE = 4


class Pages(NamedTuple):
    """Paged memory of one plane: ``memory`` [pages, heads, page_tokens, dim] on the device, in any order of strides.

    ``dtype``: what its items mean, "float32", "float16" or "bfloat16" (as uint16 where the array module has none).
    ``table`` int32 [entries]: page of each run of ``page_tokens`` tokens. dim must be contiguous, other strides and the
    address multiples of four items. For a cache in the order [pages, page_tokens, heads, dim] give its transposed view.
    """

    memory: Any
    dtype: str
    table: Any


class CodedPlane(NamedTuple):
    """A coded stream and where it goes: token 0 to slot ``row`` of the page table, standing at position ``start``.

    ``data``: the bytes, on the host. ``refinement``: then ``data`` is of the level that the card's level refines.
    """

    layer: int
    role: str
    data: Any
    pages: Pages
    row: int = 0
    start: int = 0
    refinement: Any = None


class DeviceCard:
    """One level of a card in device memory (``book``, ``groups``, ``tables``, ``codes``); immutable.

    ``dtype``: that of the model space, "float32", "float16" or "bfloat16". ValueError if the device cannot
    do a plane's heads (multiples of 8 channels) or the tables do not fit into shared memory.
    """

    def __init__(self, launcher: Launcher, card: Card, level: str, dtype: str) -> None:
        xp = launcher.xp
        self.launcher, self.card = launcher, card
        self.level = card.number(level)
        self.type, self.raw_type = TYPES[dtype], TYPES[raw_type(dtype)]
        found = card.levels[self.level]
        self.base = card.number(found.info.base) if found.info.base else -1
        book = Book()
        rows = [self._groups(book, self.level)]
        if self.base >= 0:
            rows.append(self._groups(book, self.base))
        self.book_groups = np.concatenate(rows)
        self.first_base = len(rows[0]) if self.base >= 0 else 0
        self.groups = xp.asarray(self.book_groups.view(np.uint8))
        self.book = xp.asarray(book.bytes())
        self.known = len(card.tables)
        self.tables = xp.asarray(tables_of(card.tables).view(np.uint8))
        self.codes = xp.asarray(codes_of(card.tables).view(np.uint8))
        self.own = _OWN + 64 * 2 * (32 * int(self.book_groups["tiles"].max(initial=0)) + 16)
        self.warps = _warps(launcher.shared_bytes, self.known * TABLE.itemsize, self.own)
        if not self.warps:
            raise ValueError(f"{self.known} tables and a cell's numbers do not fit into the device's shared memory")

    def _groups(self, book: Book, number: int) -> npt.NDArray[np.void]:
        card, level = self.card, self.card.levels[number]
        below = card.levels[card.number(level.info.base)] if level.info.base else None
        nested = any(other.info.base == level.info.name for other in card.levels)
        rows = []
        for plane, first in zip(card.planes, card.first_group, strict=True):
            turned = rotary(card, plane)
            for i, group in enumerate(plane.groups, first):
                based = len(below.codings[i].table) if below else 0
                coding = level.codings[i]
                rows.append(book.group(group, coding, plane.dim, turned, level.step, based=based, nested=nested))
        return np.array(rows, GROUP)

    def number(self, layer: int, role: str) -> int:
        """Index of a plane; ValueError if the card has none."""
        try:
            return self.card.index[layer, role]
        except KeyError:
            raise ValueError(f"the card has no plane {role} of layer {layer}") from None


def rotary(card: Card, plane: PlaneCard) -> tuple[Any, int]:
    """How a plane is rotated: the style, and the number of angles."""
    if plane.rope < 0:
        return "none", 0
    rope = card.ropes[plane.rope]
    return rope.style, len(rope.inv_freq) if rope.style != "none" else 0


def _warps(room: int, tables: int, own: int) -> int:
    """Warps of a block, 1 to 8, so that most of them fit onto a multiprocessor; 0 if not even one fits."""
    fits = [warps for warps in range(8, 0, -1) if tables + warps * own <= room]
    return max(fits, key=lambda warps: room // (tables + warps * own) * warps, default=0)


class Decoding:
    """Streams and pages of one launch, checked and on the device. ``launch`` queues the work, ``finish`` waits for it.

    Between the two an engine may queue what reads the pages, if it uses nothing of that before ``finish`` has returned.
    FormatError for bytes, ValueError for pages and planes. May be launched again: pages are written anew.
    """

    def __init__(self, card: DeviceCard, coded: Sequence[CodedPlane]) -> None:
        xp = card.launcher.xp
        self._card, self._coded = card, coded
        self._held: list[Any] = []  # device arrays that only addresses in structures name
        planes = np.zeros(len(coded), PLANE)
        rows, bodies = [np.zeros(0, CELL)], [np.zeros(0, np.uint8)]
        angles: dict[tuple[int, int, int], tuple[Any, Any]] = {}
        at = 0
        for number, one in enumerate(coded):
            where = f"layer {one.layer} {one.role}"
            plane = card.number(one.layer, one.role)
            cells, parsed = _cells(card, plane, one, where)
            for field, part in zip(("data", "more"), parsed):
                cells[field] += at
                at += part.data.size
                bodies.append(part.data)
            cells["plane"] = number
            rows.append(cells)
            planes[number] = _plane(card, plane, one, parsed[0].tokens, angles, self._held, where)
        self._held += angles.values()
        self._cells = np.concatenate(rows)
        self._status = xp.zeros(len(self._cells), np.uint32)
        self._arguments = (
            xp.asarray(np.concatenate(bodies)),
            xp.asarray(self._cells.view(np.uint8)),
            np.uint32(len(self._cells)),
            xp.asarray(planes.view(np.uint8)),
            card.groups,
            card.book,
            card.tables,
            np.uint32(card.known),
            np.uint32(card.own),
            self._status,
        )

    def launch(self) -> None:
        """Queue the work on the current stream."""
        card = self._card
        shared = card.known * TABLE.itemsize + card.warps * card.own
        blocks = -(-len(self._cells) // card.warps)
        card.launcher.launch("ctx_klt_decode", blocks, card.warps * _WARP, shared, self._arguments)

    def finish(self) -> None:
        """Wait; raises for the first cell that was not decoded."""
        ended = on_host(self._status)
        for cell in np.flatnonzero(ended)[:1]:
            one = self._coded[int(self._cells["plane"][cell])]
            where = f"layer {one.layer} {one.role}, tokens from {self._cells['first'][cell]}"
            if ended[cell] == _PAGE:
                raise ValueError(f"the page table has no page for a token ({where})")
            raise FormatError("a coded cell is corrupt", where=where)


def decode_to_pages(card: DeviceCard, coded: Sequence[CodedPlane]) -> None:
    """Decode streams into pages; waits for the device. FormatError for bytes, ValueError for pages and planes."""
    decoding = Decoding(card, coded)
    decoding.launch()
    decoding.finish()


def decode_planes(card: DeviceCard, coded: Sequence[tuple[int, str, Any]], dtype: str, start: int = 0) -> list[Any]:
    """Decode streams (layer, role, bytes) to arrays [heads, tokens, dim] on the device; row 0 stands at ``start``.

    ``dtype`` bfloat16 gives uint16 arrays.
    """
    xp = card.launcher.xp
    items = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
    outs, jobs = [], []
    for layer, role, data in coded:
        plane = card.card.planes[card.number(layer, role)]
        tokens = parse(data, card, card.number(layer, role), f"layer {layer} {role}").tokens
        out = xp.empty((1, plane.heads, tokens, plane.dim), items[dtype])
        outs.append(out[0])
        jobs.append(CodedPlane(layer, role, data, Pages(out, dtype, xp.zeros(1, np.int32)), 0, start))
    decode_to_pages(card, jobs)
    return outs


def _cells(card: DeviceCard, plane: int, one: CodedPlane, where: str) -> tuple[npt.NDArray[np.void], list[Parsed]]:
    """The launch's CELL records of a stream, `data` and `more` counted from the start of its own bytes."""
    refined = one.refinement is not None
    if refined and card.base < 0:
        raise ValueError(f"level {card.card.levels[card.level].info.name} refines no other ({where})")
    parts = [parse(one.data, card, plane, where, base=refined)]
    if refined:
        parts.append(parse_refinement(one.refinement, card, plane, parts[0], where))
    whole, groups = parts[0], len(card.card.planes[plane].groups)
    cells = np.zeros(len(whole.starts), CELL)
    index = np.arange(len(cells))
    cells["data"], cells["raw"] = whole.starts, whole.entries["raw"]
    cells["bytes"], cells["escapes"] = whole.entries["bytes"], whole.entries["escapes"]
    cells["group"] = card.card.first_group[plane] + index % groups
    cells["base"] = cells["group"] + (card.first_base if refined else 0)
    cells["first"] = index // groups * 64
    cells["tokens"] = np.minimum(64, whole.tokens - cells["first"])
    if refined:
        cells["more"], cells["refined"] = parts[1].starts, 1
        cells["more_bytes"], cells["more_escapes"] = parts[1].entries["bytes"], parts[1].entries["escapes"]
    return cells, parts


def _plane(
    card: DeviceCard,
    number: int,
    one: CodedPlane,
    tokens: int,
    angles: dict[tuple[int, int, int], tuple[Any, Any]],
    held: list[Any],
    where: str,
) -> np.void:
    plane = card.card.planes[number]
    out = paged(card, plane, one.pages, one.row, tokens, held, where)
    out["raw_type"] = card.raw_type
    found = angles_on(card, plane, one.start, tokens, angles, undo=False)
    out["interleaved"], out["angles"], out["cosine"], out["sine"] = found
    return out


def paged(
    card: DeviceCard, plane: PlaneCard, pages: Pages, row: int, tokens: int, held: list[Any], where: str
) -> np.void:
    """A PLANE record that says where rows ``row`` to ``row + tokens`` of a plane lie; ValueError for what cannot be."""
    xp, memory = card.launcher.xp, pages.memory
    if not isinstance(memory, xp.ndarray):
        if isinstance(memory, np.ndarray):
            raise ValueError(f"pages: the memory lies on the host ({where})")
        memory = xp.from_dlpack(memory)
    table = pages.table
    if not isinstance(table, np.ndarray | xp.ndarray):
        table = xp.from_dlpack(table)
    table = xp.ascontiguousarray(xp.asarray(table))
    held += [memory, table]
    size = 4 if pages.dtype == "float32" else 2
    if pages.dtype not in TYPES or memory.dtype.itemsize != size:
        raise ValueError(f"pages: items of {memory.dtype} are no {pages.dtype} ({where})")
    if memory.ndim != 4 or memory.shape[1] != plane.heads or memory.shape[3] != plane.dim or not memory.shape[2]:
        raise ValueError(f"pages: needs [pages, {plane.heads}, page_tokens, {plane.dim}], got {memory.shape} ({where})")
    strides = [stride // size for stride in memory.strides]
    if strides[3] != 1 or any(stride % 4 for stride in strides[:3]) or address(memory) % 16:
        raise ValueError(f"pages: dim must be contiguous and all else aligned to four items ({where})")
    if table.dtype != np.int32 or table.ndim != 1:
        raise ValueError(f"pages: the table needs int32 [entries], got {table.dtype} {table.shape} ({where})")
    if row < 0 or row + tokens > table.size * memory.shape[2]:
        raise ValueError(f"pages: {table.size} pages end before row {row + tokens} ({where})")
    out = np.zeros((), PLANE)
    out["memory"], out["pages"], out["row"] = address(memory), address(table), row
    out["page_stride"], out["head_stride"], out["token_stride"] = strides[:3]
    out["page_tokens"], out["entries"], out["limit"] = memory.shape[2], table.size, memory.shape[0]
    out["type"] = TYPES[pages.dtype]
    return cast(np.void, out[()])


def angles_on(
    card: DeviceCard,
    plane: PlaneCard,
    start: int,
    tokens: int,
    held: dict[tuple[int, int, int], tuple[Any, Any]],
    *,
    undo: bool,
) -> tuple[int, int, int, int]:
    """Interleaved?, number of angles, and the addresses of cosines and sines for `tokens` positions from ``start``."""
    style, count = rotary(card.card, plane)
    if not count:
        return 0, 0, 0, 0
    key = plane.rope, start, tokens
    if key not in held:
        cosine, sine = rope_tables(card.card.ropes[plane.rope], start, tokens, undo=undo)
        held[key] = card.launcher.xp.asarray(cosine), card.launcher.xp.asarray(sine)
    cosine, sine = held[key]
    return int(style == "pairs"), count, address(cosine), address(sine)


def address(array: Any) -> int:
    """Where an array's first element lies."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
