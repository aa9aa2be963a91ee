"""The turn lock of one session: who may add to its history now, in the order of asking."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ctxreuse.errors import SessionError

__all__ = ["Gate"]


class Gate:
    """A first-come lock that is held by a thread or a task, and may be left by any other.

    A plain lock will not do: an answer is begun in one thread and may be finished in another, and a task that waits
    must not block a thread of a pool that the holder needs to get on. Any thread may call.
    """

    __slots__ = ("__weakref__", "_lock", "_owner", "_waiting")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: object | None = None
        self._waiting: deque[tuple[object, Callable[[], None]]] = deque()

    def enter(self, owner: object, wake: Callable[[], None]) -> bool:
        """True if ``owner`` holds the gate at once; else ``wake`` is called, from any thread, when it does.

        Raises SessionError if ``owner`` holds it already: it would wait for itself.
        """
        with self._lock:
            if self._owner is owner:
                raise SessionError(
                    "an earlier answer is still being made by this thread or task",
                    fix="Read the answer to its end, or close() it, before the next turn",
                )
            if self._owner is None:
                self._owner = owner
                return True
            self._waiting.append((owner, wake))
            return False

    def leave(self) -> None:
        """Hand the gate to whoever has waited longest."""
        with self._lock:
            if not self._waiting:
                self._owner = None
                return
            self._owner, wake = self._waiting.popleft()
        wake()

    def forsake(self, wake: Callable[[], None]) -> None:
        """Stop waiting; if the gate was handed over meanwhile, hand it on."""
        with self._lock:
            for entry in self._waiting:
                if entry[1] is wake:
                    self._waiting.remove(entry)
                    return
        self.leave()

    def disown(self) -> None:
        """Nobody's any more, but not yet free: the next to ask waits even if it began what holds the gate."""
        with self._lock:
            if self._owner is not None:
                self._owner = self

    def wait(self) -> None:
        """Block until this thread holds the gate."""
        held = threading.Event()
        wake = held.set
        if not self.enter(threading.current_thread(), wake):
            try:
                held.wait()
            except BaseException:
                self.forsake(wake)
                raise

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the gate inside a ``with`` block."""
        self.wait()
        try:
            yield
        finally:
            self.leave()
