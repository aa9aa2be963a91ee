"""A codec profile in a device's memory: the transforms and tables of one level, as the kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.codec.planes import raw_type
from ctxreuse.codec.profile import CodecProfile, PlaneProfile
from ctxreuse.codec.whole import WholeForward
from ctxreuse.cuda.launch import Launcher
from ctxreuse.cuda.layout import GROUP, Book
from ctxreuse.cuda.rans import TABLE, codes_of, tables_of
from ctxreuse.dtypes import CODES

__all__ = ["DeviceProfile", "DeviceProfiles", "rotary"]

#: Bytes of shared memory that a warp takes for itself, beside a cell's numbers.
_OWN = 1280
#: Warps of a block, which has a multiprocessor to itself: as many as its registers let, or fewer if memory is short.
_WARPS = 16


class DeviceProfile:
    """One level of a profile in device memory (``book``, ``groups``, ``tables``, ``codes``); immutable but for angles.

    ``angles``: by rotation, first position and number of tokens, the last tables that were used.

    ``dtype``: that of the model space, "float32", "float16" or "bfloat16". ValueError if the device cannot
    do a plane's heads (multiples of 8 channels), the tables do not fit into shared memory, or the level is a joint one:
    its transform has more channels than a warp has room for.
    """

    def __init__(self, launcher: Launcher, profile: CodecProfile, level: str, dtype: str) -> None:
        xp = launcher.xp
        self.launcher, self.profile = launcher, profile
        self.level = profile.number(level)
        self.type, self.raw_type = CODES[dtype], CODES[raw_type(dtype)]
        found = profile.levels[self.level]
        if found.joint:
            raise ValueError(f"level {level} codes planes of several layers as one")
        self.base = profile.number(found.info.base) if found.info.base else -1
        book = Book()
        rows = [self._groups(book, self.level)]
        if self.base >= 0:
            rows.append(self._groups(book, self.base))
        self.book_groups = np.concatenate(rows)
        self.first_base = len(rows[0]) if self.base >= 0 else 0
        self.groups = xp.asarray(self.book_groups.view(np.uint8))
        self.book = xp.asarray(book.bytes())
        self.known = len(profile.tables)
        self.tables = xp.asarray(tables_of(profile.tables).view(np.uint8))
        self.codes = xp.asarray(codes_of(profile.tables).view(np.uint8))
        self.angles: dict[tuple[int, int, int], tuple[Any, Any]] = {}
        self.own = _OWN + 64 * 2 * (32 * int(self.book_groups["tiles"].max(initial=0)) + 16)
        self.warps = min(_WARPS, (launcher.shared_bytes - self.known * TABLE.itemsize) // self.own)
        if self.warps < 1:
            raise ValueError(f"{self.known} tables and a cell's numbers do not fit into the device's shared memory")

    def _groups(self, book: Book, number: int) -> npt.NDArray[np.void]:
        profile, level = self.profile, self.profile.levels[number]
        below = profile.levels[profile.number(level.info.base)] if level.info.base else None
        nested = any(other.info.base == level.info.name for other in profile.levels)
        rows = []
        for plane, first in zip(profile.planes, profile.alone.first_group, strict=True):
            angles = rotary(profile, plane)
            for i, group in enumerate(plane.groups, first):
                based = len(below.codings[i].table) if below else 0
                coding = level.codings[i]
                whole = None
                if profile.version > 1:
                    whole = WholeForward.of(group, len(coding.table)).at(level.step, nested=nested)
                own = group.rounded(coding.narrow)
                rows.append(
                    book.group(own, coding, plane.dim, angles, level.step, based=based, nested=nested, whole=whole)
                )
        return np.array(rows, GROUP)

    def number(self, layer: int, role: str) -> int:
        """Index of a plane; ValueError if the profile has none."""
        try:
            return self.profile.alone.number[layer, role]
        except KeyError:
            raise ValueError(f"the profile has no plane {role} of layer {layer}") from None


class DeviceProfiles:
    """Levels of codec profiles on one device, made when they are asked for. Any thread may call."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._made: dict[tuple[int, str, str], tuple[CodecProfile, DeviceProfile | None]] = {}

    def get(self, profile: CodecProfile, level: str, dtype: str) -> DeviceProfile | None:
        """Return one level of a profile; None if the device's kernels cannot do that one."""
        key = id(profile), level, dtype
        if key not in self._made:
            try:
                made = DeviceProfile(self._launcher, profile, level, dtype)
            except ValueError:
                made = None
            self._launcher.wait()  # other threads use it on other streams
            self._made[key] = profile, made  # which keeps the id
        return self._made[key][1]


def rotary(profile: CodecProfile, plane: PlaneProfile) -> tuple[Any, int]:
    """How a plane is rotated: the style, and the number of angles."""
    if plane.rope < 0:
        return "none", 0
    rope = profile.ropes[plane.rope]
    return rope.style, len(rope.inv_freq) if rope.style != "none" else 0
