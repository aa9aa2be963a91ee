"""Heads of coded streams, read on the host before the device sees a byte: every length that the kernels rely on."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.cuda.profile import DeviceProfile
from ctxreuse.errors import FormatError

__all__ = ["ENTRY", "Parsed", "parse", "parse_refinement"]

ENTRY: Final = np.dtype([("raw", "<u8"), ("bytes", "<u4"), ("escapes", "<u2"), ("zero", "<u2")])
_HEAD: Final = 8


class Parsed(NamedTuple):
    """A stream taken apart: its bytes, tokens, entries ENTRY [cells] and where the bodies start, int64 [cells]."""

    data: npt.NDArray[np.uint8]
    tokens: int
    entries: npt.NDArray[np.void]
    starts: npt.NDArray[np.int64]


def parse(data: Any, profile: DeviceProfile, plane: int, where: str, *, base: bool = False) -> Parsed:
    """Parse a whole stream of the level, or with ``base`` of the level that it refines. Raises FormatError."""
    first = profile.profile.alone.first_group[plane] + (profile.first_base if base else 0)
    groups = profile.book_groups[first : first + len(profile.profile.planes[plane].groups)]
    shifts = [int(group["shifts"]) for group in groups]
    rows = [int(group["channels"]) * (4 if profile.raw_type == 0 else 2) for group in groups]
    return _parse(data, profile.base if base else profile.level, 0, shifts, rows, where)


def parse_refinement(data: Any, profile: DeviceProfile, plane: int, base: Parsed, where: str) -> Parsed:
    """The refinement of ``base``; FormatError if it does not fit."""
    first = profile.profile.alone.first_group[plane]
    groups = profile.book_groups[first : first + len(profile.profile.planes[plane].groups)]
    shifts = [int(group["more_shifts"]) for group in groups]
    parsed = _parse(data, profile.level, 1, shifts, [0] * len(groups), where)
    if parsed.tokens != base.tokens or (parsed.entries["raw"] != base.entries["raw"]).any():
        raise FormatError("refinement and base differ in tokens, or in which of them are raw", where=where)
    return parsed


def _parse(data: Any, level: int, part: int, shifts: list[int], rows: list[int], where: str) -> Parsed:
    view = memoryview(data).cast("B")
    of = np.frombuffer(view, np.uint8) if view.nbytes else np.zeros(0, np.uint8)
    if of.size < _HEAD or of[:4].tolist() != [1, level, part, 0]:
        raise FormatError("corrupt stream: no head of this level", where=where)
    tokens, count = int.from_bytes(view[4:6], "little"), int.from_bytes(view[6:8], "little")
    groups = len(shifts)
    if not tokens or count != -(-tokens // 64) * groups or of.size < _HEAD + ENTRY.itemsize * count:
        raise FormatError(f"corrupt stream: {tokens} tokens in {count} cells", where=where)
    entries = np.frombuffer(view, ENTRY, count, _HEAD)
    index = np.arange(count)
    here = np.minimum(64, tokens - index // groups * 64)
    raw = np.bitwise_count(entries["raw"]).astype(np.int64)
    impossible = (here < 64) & (entries["raw"] >> np.minimum(here, 63).astype(np.uint64) != 0)
    if impossible.any() or entries["zero"].any():
        raise FormatError("corrupt stream: an unused bit of a cell is set", where=where)
    lengths = (
        entries["bytes"].astype(np.int64)
        + -(-here // 8) * np.array(shifts, np.int64)[index % groups]
        + 2 * entries["escapes"].astype(np.int64)
        + raw * np.array(rows, np.int64)[index % groups]
    )
    ends = _HEAD + ENTRY.itemsize * count + np.cumsum(lengths)
    if ends[-1] != of.size:
        raise FormatError(f"corrupt stream: {of.size} bytes, but cells end at {ends[-1]}", where=where)
    return Parsed(of, tokens, entries, ends - lengths)
