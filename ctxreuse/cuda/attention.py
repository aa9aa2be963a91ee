"""Attention over quantised parts on a device: what `ctxreuse.kernels.attention` does, with planes in the GPU's memory.

Planes are those of `ctxreuse.kernels.attention` (same formats, same scales; fp16, bf16, int8, int4) whose arrays are
the device's; `plane_on` copies one there. K and V of a part are both quantised or both 16-bit floats. Heads have 64,
128 or 256 components. Instead of rotated queries, a part brings the angles (`ctxreuse.rope.Rotation`): the kernel
rotates.

How. Rows are split among about as many blocks as the device runs at once, each for one K and V head and eight (or, of
more than eight, 32) of its query rows; int8 and int4 keys meet queries of 16 bits on the tensor cores as integers,
values meet weights as halves; a second kernel merges the blocks' results by log-sum-exp. Rows are read once from memory
for each set of query rows.

Numbers. Against float64 over the same codes: 1e-3 of the largest value (weights are rounded to 11 bits). A query that
sees no row has o = 0 and lse = -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ctxreuse.cuda.attention_layout import (
    ITEM,
    RUN,
    bits_of,
    plane_record,
    seen_rows,
    shared_out,
    spans,
    without,
)
from ctxreuse.cuda.launch import Launcher
from ctxreuse.cuda.planes import address
from ctxreuse.dtypes import CODES, VALUES
from ctxreuse.kernels.attention import Attended, Plane
from ctxreuse.rope import Rotation

__all__ = ["ChunkAttention", "DevicePart", "Room", "attend", "plane_on"]

_TYPES: Final = {np.dtype(kind): CODES[name] for name, kind in VALUES.items()}
_TILES: Final = {64: 32, 128: 16, 256: 16}
_RESIDENT: Final = {"ctx_attend_64": 2, "ctx_attend_128": 2}
"""Blocks that a multiprocessor runs at once, where it is not one."""
_THREADS, _WARPS, _COLUMNS, _WIDE = 256, 8, 8, 4
_LOG2E: Final = 1.4426950408889634


class DevicePart(NamedTuple):
    """Rows ``first``..``last`` of two planes on the device; fields as of `ctxreuse.kernels.attention.Part`.

    ``at`` and ``hidden`` are the host's arrays. ``turn``: the rotation of queries for this part.
    """

    k: Plane
    v: Plane
    first: int = 0
    last: int | None = None
    at: int | npt.NDArray[np.int64] | None = None
    turn: Rotation | None = None
    hidden: npt.NDArray[np.int64] | None = None


class Room(NamedTuple):
    """What one call writes: ``o``, ``lse``, and the results of its blocks. Reused, the next call overwrites it."""

    o: Any
    lse: Any
    parts: Any
    ends: Any


def plane_on(launcher: Launcher, plane: Plane) -> Plane:
    """A copy of a host's plane in the device's memory."""
    scales = None if plane.scales is None else launcher.xp.asarray(np.ascontiguousarray(plane.scales))
    return Plane(plane.format, launcher.xp.asarray(np.ascontiguousarray(plane.data)), scales)


def attend(launcher: Launcher, q: Any, parts: Sequence[DevicePart], **options: Any) -> Attended:
    """`ChunkAttention` for one call: q [Hq, S, D] of the device, and its keywords."""
    return ChunkAttention(launcher, parts, q.shape, **options)(q)


class ChunkAttention:
    """Attention of queries of one shape over ``parts``, laid out once and called for every such q.

    While no part has ``at`` (all rows precede all queries) and no row is added, one serves a whole answer. Making
    one waits for the device; calls are queued on the current stream. It keeps the parts' arrays.

    ``shape``: (Hq, S, D). ``positions``, ``scale``, ``window``, ``softcap``: as of `ctxreuse.kernels.attention.attend`.
    ValueError: shapes, types, formats, rows outside of their planes, what the kernels cannot do.
    """

    def __init__(
        self,
        launcher: Launcher,
        parts: Sequence[DevicePart],
        shape: tuple[int, int, int],
        *,
        positions: npt.ArrayLike | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        self._launcher, self._shape = launcher, tuple(shape)
        query_heads, queries, dim = shape
        if dim not in _TILES or query_heads < 1 or queries < 1:
            raise ValueError(f"q: needs [heads, queries, one of {', '.join(map(str, _TILES))}], got {shape}")
        if (window is not None and window < 1) or (softcap is not None and not 0 < softcap < math.inf):
            raise ValueError(f"window {window} or softcap {softcap}: not a positive number")
        where = None if positions is None else np.asarray(positions, np.int64)
        if where is not None and where.shape != (queries,):
            raise ValueError(f"positions: {where.shape} for {queries} queries")
        heads = {int(part.k.data.shape[0]) for part in parts} or {query_heads}
        self._heads = heads.pop()
        if heads or not self._heads or query_heads % self._heads:
            raise ValueError(f"parts: {query_heads} query heads do not divide among those of each part")
        self._rows = query_heads // self._heads * queries
        wide = self._rows > _COLUMNS and dim != 256
        self._kernel = f"ctx_attend_{dim}" + "_wide" * wide
        self._columns = _COLUMNS * (_WIDE if wide else 1)
        self._kept: list[Any] = [parts]
        scale = 1 / math.sqrt(dim) if scale is None else scale
        self._scale = scale / softcap if softcap is not None else scale * _LOG2E
        self._cap = softcap or 0.0
        peak = max((self._peak(part, f"part {i}", where) for i, part in enumerate(parts)), default=1.0)
        self._raised = math.ldexp(1.0, min(100, max(-100, 14 - math.frexp(peak)[1]))) if peak > 0 else 1.0
        self._lay_out([self._runs(part, where, window, f"part {i}") for i, part in enumerate(parts)])

    def room(self) -> Room:
        """Memory for a call, for callers that record calls into a CUDA graph, which may not allocate."""
        xp, (query_heads, queries, dim) = self._launcher.xp, self._shape
        o, lse = xp.empty(self._shape, np.float32), xp.empty((query_heads, queries), np.float32)
        if self._shares <= 1:
            return Room(o, lse, o, lse)
        rows = query_heads * queries
        return Room(o, lse, xp.empty((rows, self._shares, dim), np.float32), xp.empty((rows, self._shares), np.float32))

    def __call__(self, q: Any, room: Room | None = None) -> Attended:
        """o and lse of ``q``, a C-contiguous array on the device: float32, float16, or uint16 that hold bfloat16."""
        xp, (_, queries, dim) = self._launcher.xp, self._shape
        if not isinstance(q, xp.ndarray) or q.shape != self._shape or q.dtype not in _TYPES or not q.flags.c_contiguous:
            raise ValueError(f"q: needs a contiguous array {self._shape} of 16- or 32-bit floats on the device")
        o, lse, parts, ends = room or self.room()
        if not self._shares:
            o[...], lse[...] = 0, -np.inf
            return Attended(o, lse)
        numbers = (np.uint32(_TYPES[q.dtype]), np.uint32(self._heads), np.uint32(self._rows), np.uint32(queries))
        floats = (np.float32(self._scale), np.float32(self._cap), np.float32(self._raised))
        share = (self._runs_there, self._items_there, np.uint32(self._shares))
        grid = self._shares * self._heads * -(-self._rows // self._columns)
        shared = _shared_bytes(dim, self._columns)
        self._launcher.launch(self._kernel, grid, _THREADS, shared, (q, *numbers, *floats, *share, parts, ends))
        if self._shares > 1:
            merging = (parts, ends, np.uint32(self._shares), np.uint32(dim), o, lse)
            self._launcher.launch("ctx_attend_merge", self._heads * self._rows, _THREADS, 16 * _THREADS, merging)
        return Attended(o, lse)

    def _peak(self, part: DevicePart, what: str, positions: Any) -> float:
        """The largest number that weights of its values are multiplied by; checks what records do not."""
        heads, tokens = part.k.data.shape[:2]
        dim = self._shape[2]
        if part.v.data.shape[:2] != (heads, tokens) or not part.k.dim == part.v.dim == dim:
            raise ValueError(f"{what}: k {part.k.data.shape}, v {part.v.data.shape} and q {self._shape} do not fit")
        last = tokens if part.last is None else part.last
        if not 0 <= part.first <= last <= tokens or tokens > 1 << 30:
            raise ValueError(f"{what}: rows {part.first}..{last} of {tokens}")
        if (part.k.format in ("int8", "int4")) != (part.v.format in ("int8", "int4")):
            raise ValueError(f"{what}: of k {part.k.format} and v {part.v.format} one only is quantised")
        if part.at is not None and positions is None:
            raise ValueError(f"{what}: has positions, and the queries have none")
        if isinstance(part.at, np.ndarray) and (
            part.at.dtype != np.int64
            or part.at.ndim != 1
            or len(part.at) < last
            or (np.diff(part.at[part.first : last]) < 0).any()
        ):
            raise ValueError(f"{what}: at needs ascending int64, one a row")
        if part.v.format != "int8" or part.v.scales is None:
            return 1.0
        if last == part.first:
            return 0.0
        xp, scales = self._launcher.xp, part.v.scales[:, part.first : last]
        return float(xp.where(xp.isfinite(scales), xp.abs(scales), 0).max())

    def _runs(
        self, part: DevicePart, positions: npt.NDArray[np.int64] | None, window: int | None, what: str
    ) -> list[np.void]:
        """A RUN for each run of rows that some query sees."""
        xp, (_, queries, dim) = self._launcher.xp, self._shape
        record = np.zeros((), RUN)
        for name, plane in (("k", part.k), ("v", part.v)):
            record[name] = plane_record(plane, xp, address, f"{what}: {name}")
        last = int(part.k.data.shape[1]) if part.last is None else part.last
        where = np.zeros(queries, np.int64) if positions is None else positions
        seen = seen_rows(part.first, last, part.at, where, window)
        record["clear_first"], record["clear_last"] = part.first, last
        if seen is not None:
            record["clear_first"], record["clear_last"] = seen[:, 0].max(), seen[:, 1].min()
            record["seen"] = self._keep(seen)
        runs = spans(part.first, last, seen)
        if part.hidden is not None and part.hidden.size:
            if part.hidden.dtype != np.int64 or part.hidden.ndim != 1:
                raise ValueError(f"{what}: hidden needs int64 indices")
            runs = [run for span in runs for run in without(span, part.hidden)]
            record["hidden"] = self._keep(bits_of(part.hidden, int(part.k.data.shape[1])))
        if part.turn is not None:
            tables = [np.ascontiguousarray(table, np.float32) for table in (part.turn.cos, part.turn.sin)]
            if tables[0].ndim != 1 or tables[0].shape != tables[1].shape or 2 * tables[0].size > dim:
                raise ValueError(f"{what}: turn needs cos and sin of up to {dim // 2} angles")
            record["cosine"], record["sine"] = self._keep(tables[0]), self._keep(tables[1])
            record["angles"], record["interleaved"] = tables[0].size, part.turn.interleaved
        out = []
        for first, end in runs:
            record["first"], record["last"] = first, end
            out.append(cast(np.void, record.copy()[()]))
        return out

    def _keep(self, array: npt.NDArray[Any]) -> int:
        there = self._launcher.xp.asarray(array)
        self._kept.append(there)
        return address(there)

    def _lay_out(self, parts: list[list[np.void]]) -> None:
        # Quantised rows first: a block goes through them in a loop of their own.
        runs = sorted((run for part in parts for run in part), key=lambda run: int(run["k"]["format"]) < 3)
        sets = self._heads * -(-self._rows // self._columns)
        blocks = self._launcher.multiprocessors * _RESIDENT.get(self._kernel, 1)
        bounds = [(int(run["first"]), int(run["last"])) for run in runs]
        pieces, items = shared_out(bounds, _TILES[self._shape[2]], blocks // sets)
        laid = np.zeros(len(pieces), RUN)
        for i, (number, first, last) in enumerate(pieces):
            laid[i] = runs[number]
            laid["first"][i], laid["last"][i] = first, last
        self._shares = len(items)
        xp = self._launcher.xp
        self._runs_there = xp.asarray(laid.view(np.uint8))
        self._items_there = xp.asarray(np.array(items, ITEM).view(np.uint8))


def _shared_bytes(dim: int, columns: int) -> int:
    """Shared memory of a block: AttendRoom or, later, the sums of its warps; and behind both their ends."""
    groups = dim // 32
    room = -(-RUN.itemsize // 16) * 16 + columns // _COLUMNS * dim // 16 * 512
    room += 4 * columns * (1 + groups + 2) + _WARPS * 2 * groups * _TILES[dim] * 4
    return max(-(-room // 16) * 16, 4 * _WARPS * dim * _COLUMNS) + 8 * _WARPS * columns
