"""Many readers or one who moves the map: what LMDB asks of a process that changes the size of its memory map."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Gate"]


class Gate:
    """A readers-writer gate in which the one who wants to be alone goes first, and nested reads never wait."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._readers = 0
        self._wanted = 0
        self._alone = False
        self._mine = threading.local()

    @property
    def readers(self) -> int:
        """How many reads are open now."""
        return self._readers

    def enter(self) -> None:
        """Begin a read; waits while someone is alone inside or wants to be, unless this thread reads already."""
        mine = getattr(self._mine, "count", 0)
        with self._turn:
            while self._alone or (self._wanted and not mine):
                self._turn.wait()
            self._readers += 1
        self._mine.count = mine + 1

    def leave(self) -> None:
        """End a read that ``enter`` began in this thread."""
        self._mine.count = getattr(self._mine, "count", 1) - 1
        with self._turn:
            self._readers -= 1
            if not self._readers:
                self._turn.notify_all()

    @contextmanager
    def exclusive(self, timeout: float) -> Iterator[bool]:
        """Be alone inside, waiting at most ``timeout`` seconds for readers to leave; yields False if they did not.

        A thread that reads itself is told False at once: it would wait for its own end.
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
