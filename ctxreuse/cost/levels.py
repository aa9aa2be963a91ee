"""Levels as prices see them: bytes over the link, and seconds to decode what came."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from ctxreuse.block.levels import PACKED, is_joint
from ctxreuse.cost.lines import DiskLine

__all__ = ["JOINT_WORK", "Level", "Unpacking", "Work", "work_of"]

#: How blocks are coded: levels of one kind take about equally long.
Work = Literal["packed", "lossy", "joint"]
#: So many times as long as another lossy level a joint one is taken to need until it was measured.
JOINT_WORK = 5.0

#: Bytes/s of raw planes at which a level is taken to be decoded before anything was.
_GUESS = 1e9


def work_of(level: str) -> Work:
    """Return how blocks of a level, not ``exact``, are coded; with or without a profile's digest."""
    name = level.partition("@")[0]
    return "packed" if name == PACKED else "joint" if is_joint(name) else "lossy"


class Level(msgspec.Struct, frozen=True):
    """A level at which blocks can come: its name as heads spell it, the expected bytes of one block, and the seconds in
    which the sender encodes one."""

    name: str
    block_nbytes: int
    seconds: float = 0.0


class Unpacking:
    """Seconds that decoding takes on this machine, a line a level (without card). Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, DiskLine] = {}

    def observe(self, level: str, nbytes: int, seconds: float) -> None:
        """Planes of ``nbytes`` raw bytes were decoded from ``level`` in so many seconds."""
        with self._lock:
            line = self._lines.setdefault(level.partition("@")[0], DiskLine())
        line.observe(nbytes, seconds)

    def seconds(self, level: str, nbytes: int) -> float:
        """Predicted seconds to decode ``nbytes`` of raw planes; of an unknown level as of the slowest alike."""
        with self._lock:
            lines = dict(self._lines)
        name, joint = level.partition("@")[0], work_of(level) == "joint"
        alike = [name] if name in lines else [one for one in lines if (work_of(one) == "joint") == joint]
        found = [seconds for one in alike if (seconds := lines[one].seconds(nbytes)) is not None]
        if joint and not found:
            found = [JOINT_WORK * seconds for line in lines.values() if (seconds := line.seconds(nbytes)) is not None]
        return max(found, default=nbytes / _GUESS * (JOINT_WORK if joint else 1))

    def knows(self, level: str) -> bool:
        """Return True once a block of this level was decoded."""
        with self._lock:
            return level.partition("@")[0] in self._lines

    def dump(self) -> dict[str, list[tuple[float, ...]]]:
        """Return the observations by level."""
        with self._lock:
            return {name: line.dump() for name, line in self._lines.items()}

    def restore(self, cached: Mapping[str, Sequence[tuple[float, ...]]]) -> None:
        """Take what `dump` gave."""
        with self._lock:
            for name, rows in cached.items():
                self._lines.setdefault(name, DiskLine()).restore(rows)
