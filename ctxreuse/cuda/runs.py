"""Coded planes of consecutive blocks decoded on a device, one launch for all planes of some layers.

What `decode_to_pages` does for any streams, for many alike ones: the heads of the blocks of a plane are read together,
and their rows follow each other in one piece of memory. The host's part is then small beside the copy of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.cuda.cells import ENTRY
from ctxreuse.cuda.layout import CELL, PLANE
from ctxreuse.cuda.planes import CodedPlane, Decoding, Pages, plane_record
from ctxreuse.cuda.profile import DeviceProfile
from ctxreuse.dtypes import VALUES
from ctxreuse.errors import FormatError

__all__ = ["BlockRun", "decode_runs"]

_HEAD = 8
#: Spans of positions whose angles are kept.
_ANGLES = 8


class BlockRun(NamedTuple):
    """One plane of blocks that follow each other, and where it goes.

    Attributes:
        starts: where the plane's bytes of each block begin in the data, int64 [blocks].
        sizes: how many there are, int64 [blocks].
        tokens: how many tokens each has, int64 [blocks].
        memory: [1, heads, capacity, dim] on the device, of whole numbers of the type's size.
        row: the first row.
        start: the position of the first token.
    """

    layer: int
    role: str
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    memory: Any
    row: int
    start: int


def decode_runs(
    profile: DeviceProfile, runs: Sequence[BlockRun], data: npt.NDArray[np.uint8], there: Any, dtype: str
) -> None:
    """Decode runs in one launch, and wait. Any thread may call.

    Args:
        profile: the level that all have.
        runs: what to decode.
        data: the bytes of all their streams, on the host.
        there: the same on the device.
        dtype: the type of the model space.

    Raises FormatError for bytes, ValueError for memory.
    """
    table = profile.launcher.xp.zeros(1, np.int32)
    cells, planes, names, kept = [np.zeros(0, CELL)], np.zeros(len(runs), PLANE), list[CodedPlane](), list[Any]()
    angles = dict(profile.angles) if len(profile.angles) < _ANGLES else {}
    for number, run in enumerate(runs):
        where = f"layer {run.layer} {run.role}"
        plane = profile.number(run.layer, run.role)
        cells.append(_cells(profile, plane, run, data, where))
        cells[-1]["plane"] = number
        one = CodedPlane(
            run.layer, run.role, b"", Pages(run.memory.view(VALUES[dtype]), dtype, table), run.row, run.start
        )
        planes[number] = plane_record(profile, plane, one, int(run.tokens.sum()), angles, kept, where)
        names.append(one)
    decoding = Decoding.of(profile, names, np.concatenate(cells), planes, there, [*kept, *angles.values()])
    decoding.launch()
    decoding.finish()
    profile.angles = angles  # they are there now, for other streams too


def _cells(
    profile: DeviceProfile, plane: int, run: BlockRun, data: npt.NDArray[np.uint8], where: str
) -> npt.NDArray[np.void]:
    """The CELL records of all streams of a run."""
    if not len(run.sizes):
        return np.zeros(0, CELL)
    firsts = np.cumsum(run.tokens) - run.tokens
    cuts = [0, *(np.flatnonzero(np.diff(run.tokens)) + 1).tolist(), len(run.tokens)]
    alike = [slice(*pair) for pair in pairwise(cuts)]
    return np.concatenate([_equal(profile, plane, run, data, part, firsts, where) for part in alike])


def _equal(
    profile: DeviceProfile,
    plane: int,
    run: BlockRun,
    data: npt.NDArray[np.uint8],
    part: slice,
    firsts: npt.NDArray[np.int64],
    where: str,
) -> npt.NDArray[np.void]:
    """The cells of some streams that have the same number of tokens."""
    tokens, group = int(run.tokens[part.start]), profile.profile.alone.first_group[plane]
    groups = profile.book_groups[group : group + len(profile.profile.planes[plane].groups)]
    count = -(-tokens // 64) * len(groups)
    size = _HEAD + ENTRY.itemsize * count
    starts, sizes = run.starts[part], run.sizes[part]
    if not 0 < tokens < 1 << 16 or (sizes < size).any():
        raise FormatError("corrupt stream: too short for its tokens", where=where)
    heads = data[starts[:, None] + np.arange(size)]
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
    if (stops[:, -1] != sizes).any():
        raise FormatError("corrupt stream: its cells do not end where it does", where=where)
    cells = np.zeros((len(sizes), count), CELL)
    cells["data"] = stops - lengths + starts[:, None]
    for name in ("raw", "bytes", "escapes"):
        cells[name] = entries[name]
    cells["group"] = cells["base"] = group + index % len(groups)
    cells["first"] = firsts[part, None] + index // len(groups) * 64
    cells["tokens"] = here
    return cells.reshape(-1)
