"""A readers-writer lock for the memory map: LMDB allows a resize only while this process reads nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MapLock"]


class MapLock:
    """A readers-writer lock that prefers the writer and never blocks nested reads."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._readers = 0
        self._wanted = 0
        self._alone = False
        self._mine = threading.local()

    def enter(self) -> None:
        """Begin a read; waits for a writer, also one that waits itself, unless this thread reads already."""
        mine = getattr(self._mine, "count", 0)
        with self._turn:
            while self._alone or (self._wanted and not mine):
                self._turn.wait()
            self._readers += 1
        self._mine.count = mine + 1

    def leave(self) -> None:
        """End a read that `enter` began in this thread."""
        self._mine.count = getattr(self._mine, "count", 1) - 1
        with self._turn:
            self._readers -= 1
            if not self._readers:
                self._turn.notify_all()

    @contextmanager
    def exclusive(self, timeout: float) -> Iterator[bool]:
        """Lock out readers, waiting at most ``timeout`` seconds for those inside; yields False if they stay.

        Yields False at once in a thread that reads itself.
        """
        with self._turn:
            self._wanted += 1
            wait = 0.0 if getattr(self._mine, "count", 0) else timeout
            alone = self._turn.wait_for(lambda: not self._readers and not self._alone, wait)
            self._wanted -= 1
            self._alone = self._alone or alone
            if not alone:
                self._turn.notify_all()
        try:
            yield alone
        finally:
            if alone:
                with self._turn:
                    self._alone = False
                    self._turn.notify_all()
