"""Blocks that were given are audited beside the traffic; until then nobody finds them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from ctxreuse.block import BlockView, parse

__all__ = ["Audit", "Auditor", "Judged"]

log = logging.getLogger(__name__)

#: (space digest, blocks of it) -> False if one of them cannot be what its tokens say. Called in a thread of its own.
Audit: TypeAlias = Callable[[bytes, Sequence[BlockView]], bool]

_BATCH = 32


class _Given(NamedTuple):
    user: str
    key: bytes
    space: bytes
    data: memoryview


class Judged(NamedTuple):
    """Blocks that one user gave, and whether the audit found nothing wrong."""

    user: str
    keys: tuple[bytes, ...]
    sound: bool


class Auditor:
    """A queue of at most ``limit`` bytes of blocks and the thread that audits them. Any thread may call.

    The thread runs while there is something to audit.
    """

    def __init__(self, audit: Audit, *, limit: int) -> None:
        self._audit, self._limit = audit, limit
        self._changed = threading.Condition()
        self._queue: deque[_Given] = deque()
        self._judged: list[Judged] = []
        self._bytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, user: str, key: bytes, space: bytes, data: memoryview) -> bool:
        """Queue a sealed block; False if too many wait. Never blocks."""
        with self._changed:
            if self._closed or (self._bytes and self._bytes + len(data) > self._limit):
                return False
            self._queue.append(_Given(user, key, space, data))
            self._bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ctxreuse-audit", daemon=True)
                self._thread.start()
            return True

    def judged(self) -> list[Judged]:
        """What was found since the last call."""
        if not self._judged:
            return []
        with self._changed:
            found, self._judged = self._judged, []
            return found

    def wait(self, timeout: float) -> bool:
        """True when nothing waits any more; False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes, timeout)

    def close(self) -> None:
        """Drop what waits and end the thread."""
        with self._changed:
            self._closed = True
            self._bytes -= sum(len(given.data) for given in self._queue)
            self._queue.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                batch = self._take()
                if not batch:
                    self._thread = None
                    return
            try:
                sound = self._audit(batch[0].space, [parse(given.data) for given in batch])
            except Exception:
                if self._closed:
                    return  # who computes has been closed before: these stay unjudged
                # Not the peer's fault as far as is known: its blocks have passed all other checks.
                log.exception("the audit of given blocks failed; they are kept")
                sound = True
            with self._changed:
                self._judged.append(Judged(batch[0].user, tuple(given.key for given in batch), sound))
                self._bytes -= sum(len(given.data) for given in batch)
                self._changed.notify_all()

    def _take(self) -> list[_Given]:
        batch: list[_Given] = []
        while self._queue and len(batch) < _BATCH:
            if batch and (self._queue[0].user, self._queue[0].space) != (batch[0].user, batch[0].space):
                break
            batch.append(self._queue.popleft())
        return batch
