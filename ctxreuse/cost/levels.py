"""Levels as prices see them: bytes over the link, and seconds to decode what came."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import msgspec

from ctxreuse.cost.lines import DiskLine

__all__ = ["Level", "Unpacking"]

#: Bytes/s of raw planes at which a level is taken to be decoded before anything was.
_GUESS = 1e9


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
        """Predicted seconds to decode ``nbytes`` of raw planes; of an unknown level as of the slowest known one."""
        with self._lock:
            lines = dict(self._lines)
        known = lines.get(level.partition("@")[0])
        found = [line.seconds(nbytes) for line in ([known] if known is not None else lines.values())]
        return max((one for one in found if one is not None), default=nbytes / _GUESS)

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
