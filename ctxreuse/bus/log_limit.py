"""Log lines that a peer can cause, so many in a minute: a flood must neither fill the disk nor hide what matters."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

__all__ = ["LimitedLog"]

#: Lines that a name may cause at once, and seconds in which it earns another one.
_BURST, _SECONDS = 10, 30.0
#: Names remembered; of strangers all are one name.
_NAMES = 1024


class _Spent:
    __slots__ = ("at", "left", "unsaid")

    def __init__(self, now: float) -> None:
        self.left, self.at, self.unsaid = float(_BURST), now, 0


class LimitedLog:
    """A logger with a budget for each name: ten lines at once, then one in half a minute. Thread-safe.

    A line after some that were left out says how many.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._names: OrderedDict[str, _Spent] = OrderedDict()

    def write(self, name: str, level: int, text: str, *values: object, **options: Any) -> None:
        """Log a line that ``name`` caused, if it has any left. ``options``: of `logging.Logger.log`."""
        if not self._log.isEnabledFor(level):
            return
        now = self._clock()
        with self._lock:
            spent = self._names.setdefault(name, _Spent(now))
            self._names.move_to_end(name)
            if len(self._names) > _NAMES:
                self._names.popitem(last=False)
            spent.left, spent.at = min(_BURST, spent.left + (now - spent.at) / _SECONDS), now
            if spent.left < 1:
                spent.unsaid += 1
                return
            spent.left -= 1
            unsaid, spent.unsaid = spent.unsaid, 0
        if unsaid:
            text, values = text + " (%d lines like this were left out)", (*values, unsaid)
        self._log.log(level, text, *values, **options)
