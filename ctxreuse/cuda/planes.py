"""Coded planes (`ctxreuse.codec`) decoded on a device, straight into an engine's paged cache.

`decode_to_pages` takes coded streams of any
layers, roles and lengths and decodes them in one launch, a warp for each 64 tokens of a channel group; keys are rotated
for their positions. The numbers are those of the CPU's decoder, bit for bit.

Streams are hostile: lengths are checked on the host before anything is queued, contents on the device. A corrupt stream
raises FormatError; cells of it that are sound may have been written by then, other streams are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ctxreuse.codec.profile import PlaneProfile
from ctxreuse.cuda.cells import Parsed, parse, parse_refinement
from ctxreuse.cuda.copies import on_host, to_device
from ctxreuse.cuda.layout import CELL, PLANE
from ctxreuse.cuda.profile import DeviceProfile, rotary
from ctxreuse.cuda.rans import TABLE
from ctxreuse.dtypes import CODES, FLOATS
from ctxreuse.errors import FormatError

__all__ = ["CodedPlane", "Decoding", "Pages", "decode_to_pages", "plane_record"]

_WARP = 32
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
    """A coded stream and where it goes: token 0 to slot ``row`` of the page table, at position ``start``.

    ``data``: the bytes, on the host. ``refinement``: then ``data`` is of the level that the profile's level refines.
    """

    layer: int
    role: str
    data: Any
    pages: Pages
    row: int = 0
    start: int = 0
    refinement: Any = None


class Decoding:
    """Streams and pages of one launch, checked and on the device. ``launch`` queues the work, ``finish`` waits for it.

    Between the two an engine may queue what reads the pages, if it uses nothing of that before ``finish`` has returned.
    FormatError for bytes, ValueError for pages and planes. May be launched again: pages are written again.
    """

    def __init__(self, profile: DeviceProfile, coded: Sequence[CodedPlane]) -> None:
        self._profile, self._coded = profile, coded
        self._kept: list[Any] = []  # arrays that only addresses in structures, or copies that are queued, name
        planes = np.zeros(len(coded), PLANE)
        rows, bodies = [np.zeros(0, CELL)], [np.zeros(0, np.uint8)]
        angles: dict[tuple[int, int, int], tuple[Any, Any]] = {}
        at = 0
        for number, one in enumerate(coded):
            where = f"layer {one.layer} {one.role}"
            plane = profile.number(one.layer, one.role)
            cells, parsed = _cells(profile, plane, one, where)
            for field, part in zip(("data", "more"), parsed):
                cells[field] += at
                at += part.data.size
                bodies.append(part.data)
            cells["plane"] = number
            rows.append(cells)
            planes[number] = plane_record(profile, plane, one, parsed[0].tokens, angles, self._kept, where)
        self._kept += angles.values()
        self._lay_out(np.concatenate(rows), planes, to_device(profile.launcher, bodies, self._kept))

    @classmethod
    def of(
        cls,
        profile: DeviceProfile,
        coded: Sequence[CodedPlane],
        cells: npt.NDArray[np.void],
        planes: npt.NDArray[np.void],
        bodies: Any,
        kept: list[Any],
    ) -> Decoding:
        """Return the launch of these CELL and PLANE records, which are right; ``coded`` names their planes."""
        self = cls.__new__(cls)
        self._profile, self._coded, self._kept = profile, coded, kept
        self._lay_out(cells, planes, bodies)
        return self

    def _lay_out(self, cells: npt.NDArray[np.void], planes: npt.NDArray[np.void], bodies: Any) -> None:
        profile, xp = self._profile, self._profile.launcher.xp
        # Warps that work at the same time take neighbours, and have a basis in common if these are of one group.
        self._cells = cells[np.argsort(cells["group"], kind="stable")]
        self._status, self._taken, self._before = xp.zeros(len(cells), np.uint32), xp.zeros(1, np.uint32), 0
        self._arguments = (
            bodies,
            to_device(profile.launcher, [self._cells], self._kept),
            np.uint32(len(self._cells)),
            to_device(profile.launcher, [planes], self._kept),
            profile.groups,
            profile.book,
            profile.tables,
            np.uint32(profile.known),
            np.uint32(profile.own),
            self._status,
            self._taken,
        )

    def launch(self) -> None:
        """Queue the work on the current stream."""
        profile = self._profile
        shared = profile.known * TABLE.itemsize + profile.warps * profile.own
        blocks = min(profile.launcher.multiprocessors, -(-len(self._cells) // profile.warps))
        arguments = (*self._arguments, np.uint32(self._before))
        profile.launcher.launch("ctx_klt_decode", blocks, profile.warps * _WARP, shared, arguments)
        # Each warp asks once more than there are cells for it.
        self._before = self._before + len(self._cells) + blocks * profile.warps & 0xFFFFFFFF

    def finish(self) -> None:
        """Wait; raises for the first cell that was not decoded."""
        ended = on_host(self._status)
        for cell in np.flatnonzero(ended)[:1]:
            one = self._coded[int(self._cells["plane"][cell])]
            where = f"layer {one.layer} {one.role}, tokens from {self._cells['first'][cell]}"
            if ended[cell] == _PAGE:
                raise ValueError(f"the page table has no page for a token ({where})")
            raise FormatError("corrupt stream", where=where)


def decode_to_pages(profile: DeviceProfile, coded: Sequence[CodedPlane]) -> None:
    """Decode streams into pages; waits for the device. FormatError for bytes, ValueError for pages and planes."""
    decoding = Decoding(profile, coded)
    decoding.launch()
    decoding.finish()


def _cells(
    profile: DeviceProfile, plane: int, one: CodedPlane, where: str
) -> tuple[npt.NDArray[np.void], list[Parsed]]:
    """The launch's CELL records of a stream, `data` and `more` counted from the start of its own bytes."""
    refined = one.refinement is not None
    if refined and profile.base < 0:
        raise ValueError(f"level {profile.profile.levels[profile.level].info.name} refines no other ({where})")
    parts = [parse(one.data, profile, plane, where, base=refined)]
    if refined:
        parts.append(parse_refinement(one.refinement, profile, plane, parts[0], where))
    whole, groups = parts[0], len(profile.profile.planes[plane].groups)
    cells = np.zeros(len(whole.starts), CELL)
    index = np.arange(len(cells))
    cells["data"], cells["raw"] = whole.starts, whole.entries["raw"]
    cells["bytes"], cells["escapes"] = whole.entries["bytes"], whole.entries["escapes"]
    cells["group"] = profile.profile.alone.first_group[plane] + index % groups
    cells["base"] = cells["group"] + (profile.first_base if refined else 0)
    cells["first"] = index // groups * 64
    cells["tokens"] = np.minimum(64, whole.tokens - cells["first"])
    if refined:
        cells["more"], cells["refined"] = parts[1].starts, 1
        cells["more_bytes"], cells["more_escapes"] = parts[1].entries["bytes"], parts[1].entries["escapes"]
    return cells, parts


def plane_record(
    profile: DeviceProfile,
    number: int,
    one: CodedPlane,
    tokens: int,
    angles: dict[tuple[int, int, int], tuple[Any, Any]],
    kept: list[Any],
    where: str,
) -> np.void:
    """Return the launch's PLANE record of a coded plane of so many tokens; raises ValueError for its memory."""
    plane = profile.profile.planes[number]
    out = paged(profile, plane, one.pages, one.row, tokens, kept, where)
    out["raw_type"] = profile.raw_type
    found = angles_on(profile, plane, one.start, tokens, angles, undo=False)
    out["interleaved"], out["angles"], out["cosine"], out["sine"] = found
    return out


def paged(
    profile: DeviceProfile, plane: PlaneProfile, pages: Pages, row: int, tokens: int, kept: list[Any], where: str
) -> np.void:
    """A PLANE record that says where rows ``row`` to ``row + tokens`` of a plane lie; raises ValueError."""
    xp, memory = profile.launcher.xp, pages.memory
    if not isinstance(memory, xp.ndarray):
        if isinstance(memory, np.ndarray):
            raise ValueError(f"pages: the memory is on the host ({where})")
        memory = xp.from_dlpack(memory)
    table = pages.table
    if not isinstance(table, np.ndarray | xp.ndarray):
        table = xp.from_dlpack(table)
    table = xp.ascontiguousarray(xp.asarray(table))
    kept += [memory, table]
    size = 4 if pages.dtype == "float32" else 2
    if pages.dtype not in FLOATS or memory.dtype.itemsize != size:
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
    out["type"] = CODES[pages.dtype]
    return cast(np.void, out[()])


def angles_on(
    profile: DeviceProfile,
    plane: PlaneProfile,
    start: int,
    tokens: int,
    tables: dict[tuple[int, int, int], tuple[Any, Any]],
    *,
    undo: bool,
) -> tuple[int, int, int, int]:
    """Interleaved?, number of angles, and the addresses of cosines and sines for `tokens` positions from ``start``."""
    style, count = rotary(profile.profile, plane)
    if not count:
        return 0, 0, 0, 0
    key = plane.rope, start, tokens
    if key not in tables:
        cosine, sine = profile.profile.ropes[plane.rope].span_tables(start, tokens, undo=undo)
        tables[key] = profile.launcher.xp.asarray(cosine), profile.launcher.xp.asarray(sine)
    cosine, sine = tables[key]
    return int(style == "pairs"), count, address(cosine), address(sine)


def address(array: Any) -> int:
    """Return the address of an array's first element."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
