"""The turn lock of one session: writers of its history wait in order of arrival."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ctxreuse.errors import SessionError

__all__ = ["TurnLock"]


class TurnLock:
    """A fair lock, owned by a thread or a task and released by any other. Thread-safe.

    A plain lock does not suffice: an answer may begin in one thread and end in another, and a waiting task must not
    block a pool thread that the owner needs.
    """

    __slots__ = ("__weakref__", "_lock", "_owner", "_waiting")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: object | None = None
        self._waiting: deque[tuple[object, Callable[[], None]]] = deque()

    def enter(self, owner: object, wake: Callable[[], None]) -> bool:
        """Take the lock. If it is taken, return False and call ``wake``, from any thread, once ``owner`` has it.

        Raises SessionError if ``owner`` has it already, which would be a deadlock.
        """
        with self._lock:
            if self._owner is owner:
                raise SessionError(
                    "an earlier answer of this thread or task has not ended",
                    fix="Read that answer to its end, or close() it, before the next turn",
                )
            if self._owner is None:
                self._owner = owner
                return True
            self._waiting.append((owner, wake))
            return False

    def leave(self) -> None:
        """Release the lock to the longest waiter."""
        with self._lock:
            if not self._waiting:
                self._owner = None
                return
            self._owner, wake = self._waiting.popleft()
        wake()

    def cancel_wait(self, wake: Callable[[], None]) -> None:
        """Stop waiting; if the lock was taken meanwhile, release it."""
        with self._lock:
            for entry in self._waiting:
                if entry[1] is wake:
                    self._waiting.remove(entry)
                    return
        self.leave()

    def disown(self) -> None:
        """Keep the lock without an owner, so that even the previous owner waits for it."""
        with self._lock:
            if self._owner is not None:
                self._owner = self

    def wait(self, seconds: float | None = None) -> None:
        """Block until this thread owns the lock. Raises SessionError if it has not after so many seconds."""
        taken = threading.Event()
        wake = taken.set
        if not self.enter(threading.current_thread(), wake):
            try:
                if not taken.wait(seconds):
                    what = "an answer of this session has not ended"
                    raise SessionError(what, fix="Read it to its end, or close() it")
            except BaseException:
                self.cancel_wait(wake)
                raise

    @contextmanager
    def hold(self, seconds: float | None = None) -> Iterator[None]:
        """Own the lock inside a ``with`` block. Raises what `wait` raises."""
        self.wait(seconds)
        try:
            yield
        finally:
            self.leave()
