"""The writer's thread: a queue bounded by bytes, batches, and a tick about each second."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Writer"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class Writer(Generic[T]):
    """Calls ``commit(items)`` with up to ``batch`` items (and ``batch_bytes``), and ``tick()`` a ``period`` (s) later.

    ``tick`` returns True to be called again after another period; else the thread sleeps until the next item. Both run
    in the writer's thread; an exception there is logged and the thread goes on.
    """

    def __init__(
        self,
        commit: Callable[[list[T]], None],
        tick: Callable[[], bool],
        *,
        limit_bytes: int,
        batch: int = 64,
        batch_bytes: int = 256 << 20,
        period: float = 1.0,
    ) -> None:
        self._commit, self._tick = commit, tick
        self._limit, self._batch, self._batch_bytes, self._period = limit_bytes, batch, batch_bytes, period
        self._queue: deque[tuple[T, int]] = deque()
        self._changed = threading.Condition()
        self._bytes = 0
        self._accepted = self._finished = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ctxreuse-writer", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> tuple[int, int]:
        """Items and bytes that are not committed yet."""
        return self._accepted - self._finished, self._bytes

    def put(self, item: T, nbytes: int, wait: float) -> bool:
        """Queue one item, waiting at most ``wait`` seconds for room; False if there is none or the writer closed.

        An item larger than the whole limit is accepted when the queue is empty.
        """
        with self._changed:
            if not self._fits(nbytes):
                self._changed.wait_for(lambda: self._fits(nbytes), wait)
            if self._closing or not self._fits(nbytes):
                return False
            self._queue.append((item, nbytes))
            self._bytes += nbytes
            self._accepted += 1
            self._changed.notify_all()
            return True

    def _fits(self, nbytes: int) -> bool:
        return self._closing or not self._bytes or self._bytes + nbytes <= self._limit

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all items accepted before are committed; False at the timeout."""
        with self._changed:
            target = self._accepted
            return self._changed.wait_for(lambda: self._finished >= target or not self._thread.is_alive(), timeout)

    def close(self) -> None:
        """Commit what is queued and end the thread. A second call does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _take(self, wait: float | None) -> tuple[list[T], int]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing, wait)
            items: list[T] = []
            size = 0
            while self._queue and len(items) < self._batch:
                nbytes = self._queue[0][1]
                if items and size + nbytes > self._batch_bytes:
                    break
                items.append(self._queue.popleft()[0])
                size += nbytes
            return items, size

    def _run(self) -> None:
        due: float | None = None
        while True:
            items, size = self._take(None if due is None else max(0.0, due - time.monotonic()))
            if items:
                self._guarded(self._commit, items)
                count = len(items)
                items = []
                with self._changed:
                    self._bytes -= size
                    self._finished += count
                    self._changed.notify_all()
                due = time.monotonic() + self._period if due is None else due
            if due is not None and time.monotonic() >= due:
                due = time.monotonic() + self._period if self._guarded(self._tick) else None
            if self._closing and not self._queue:
                return

    def _guarded(self, step: Callable[..., object], *arguments: object) -> bool:
        try:
            return bool(step(*arguments))
        except Exception:
            log.exception("the store's writer failed; it goes on with the next batch")
            return False
