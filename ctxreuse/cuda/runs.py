"""Coded planes of consecutive blocks decoded on a device, one launch for all planes of some layers.

What `decode_to_pages` does for any streams, for many alike ones: the heads of the blocks of a plane are read together,
and their rows follow each other in one piece of memory. The host's part is then small beside the copy of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.cuda.cells import ENTRY
from ctxreuse.cuda.layout import CELL, PLANE
from ctxreuse.cuda.planes import CodedPlane, Decoding, Pages, angles_on, paged
from ctxreuse.cuda.profile import DeviceProfile
from ctxreuse.errors import FormatError

__all__ = ["BlockRun", "RunDecoder"]

_HEAD = 8


class BlockRun(NamedTuple):
    """One plane of blocks that follow each other, and where it goes.

    Attributes:
        streams: the plane's bytes in each block.
        tokens: how many tokens each has.
        memory: [1, heads, capacity, dim] on the device, of whole numbers of the type's size.
        row: the first row.
        start: the position of the first token.
    """

    layer: int
    role: str
    streams: Sequence[memoryview]
    tokens: Sequence[int]
    memory: Any
    row: int
    start: int


class RunDecoder:
    """Decodes runs at one level; the angles of the last positions stay on the device. One thread at a time."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile
        self._angles: dict[tuple[int, int, int], tuple[Any, Any]] = {}

    def decode(self, runs: Sequence[BlockRun], dtype: str) -> None:
        """Decode them in one launch, and wait. Raises FormatError for bytes, ValueError for memory."""
        profile, xp = self.profile, self.profile.launcher.xp
        rows, planes, names = [np.zeros(0, CELL)], np.zeros(len(runs), PLANE), []
        kept: list[Any] = []
        angles, at = dict(self._angles), 0
        for number, run in enumerate(runs):
            where = f"layer {run.layer} {run.role}"
            plane, total = profile.number(run.layer, run.role), sum(run.tokens)
            cells = _cells(profile, plane, run, where)
            cells["data"] += at
            cells["plane"] = number
            at += sum(map(len, run.streams))
            rows.append(cells)
            memory = xp.from_dlpack(run.memory) if not isinstance(run.memory, xp.ndarray) else run.memory
            if dtype == "bfloat16":
                memory = memory.view(np.uint16)
            elif memory.dtype.kind != "f":
                memory = memory.view(np.dtype(dtype))
            pages = Pages(memory, dtype, xp.zeros(1, np.int32))
            kept += [memory, pages.table]
            planes[number] = paged(profile, profile.profile.planes[plane], pages, run.row, total, kept, where)
            planes["raw_type"][number] = profile.raw_type
            found = angles_on(profile, profile.profile.planes[plane], run.start, total, angles, undo=False)
            for field, value in zip(("interleaved", "angles", "cosine", "sine"), found):
                planes[field][number] = value
            names.append(CodedPlane(run.layer, run.role, b"", pages))
        self._angles = angles
        bodies = np.empty(at, np.uint8)
        at = 0
        for run in runs:
            for stream in run.streams:
                bodies[at : at + len(stream)] = np.frombuffer(stream, np.uint8)
                at += len(stream)
        decoding = Decoding.of(profile, names, np.concatenate(rows), planes, bodies, [*kept, *angles.values()])
        decoding.launch()
        decoding.finish()


def _cells(profile: DeviceProfile, plane: int, run: BlockRun, where: str) -> npt.NDArray[np.void]:
    """The CELL records of all streams of a run, `data` counted from the first of its bytes."""
    if not run.streams:
        return np.zeros(0, CELL)
    ends = np.cumsum([len(stream) for stream in run.streams])
    firsts, out = np.cumsum([0, *run.tokens[:-1]]), []
    for first, last in _alike(run.tokens):
        out.append(_equal(profile, plane, run, first, last, firsts, ends, where))
    return np.concatenate(out)


def _alike(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Runs (first, last) of neighbours of one number of tokens."""
    cuts = [i for i in range(len(tokens)) if i == 0 or tokens[i] != tokens[i - 1]]
    return list(zip(cuts, [*cuts[1:], len(tokens)]))


def _equal(
    profile: DeviceProfile,
    plane: int,
    run: BlockRun,
    first: int,
    last: int,
    firsts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    where: str,
) -> npt.NDArray[np.void]:
    """The cells of streams ``first`` to ``last``, which have the same number of tokens."""
    tokens, blocks, group = run.tokens[first], last - first, profile.profile.first_group[plane]
    groups = profile.book_groups[group : group + len(profile.profile.planes[plane].groups)]
    count = -(-tokens // 64) * len(groups)
    size = _HEAD + ENTRY.itemsize * count
    streams = run.streams[first:last]
    if not 0 < tokens < 1 << 16 or any(len(stream) < size for stream in streams):
        raise FormatError("corrupt stream: too short for its tokens", where=where)
    heads = np.frombuffer(b"".join(stream[:size] for stream in streams), np.uint8).reshape(blocks, size)
    wanted = bytes([1, profile.level, 0, 0]) + tokens.to_bytes(2, "little") + count.to_bytes(2, "little")
    if (heads[:, :_HEAD] != np.frombuffer(wanted, np.uint8)).any():
        raise FormatError(f"corrupt stream: no head of this level and {tokens} tokens", where=where)
    entries = np.ascontiguousarray(heads[:, _HEAD:]).view(ENTRY)
    index = np.arange(count)
    here = np.minimum(64, tokens - index // len(groups) * 64)
    of = groups[index % len(groups)]
    impossible = (here < 64) & (entries["raw"] >> np.minimum(here, 63).astype(np.uint64) != 0)
    if impossible.any() or entries["zero"].any():
        raise FormatError("corrupt stream: an unused bit of a cell is set", where=where)
    lengths = (
        entries["bytes"].astype(np.int64)
        + -(-here // 8) * of["shifts"].astype(np.int64)
        + 2 * entries["escapes"].astype(np.int64)
        + np.bitwise_count(entries["raw"]).astype(np.int64) * of["channels"] * (4 if profile.raw_type == 0 else 2)
    )
    stops = size + np.cumsum(lengths, 1)
    sizes = np.array([len(stream) for stream in streams])
    if (stops[:, -1] != sizes).any():
        raise FormatError("corrupt stream: its cells do not end where it does", where=where)
    cells = np.zeros((blocks, count), CELL)
    cells["data"] = stops - lengths + (ends[first:last] - sizes)[:, None]
    for field, name in (("raw", "raw"), ("bytes", "bytes"), ("escapes", "escapes")):
        cells[field] = entries[name]
    cells["group"] = cells["base"] = group + index % len(groups)
    cells["first"] = firsts[first:last, None] + index // len(groups) * 64
    cells["tokens"] = here
    return cells.reshape(-1)
