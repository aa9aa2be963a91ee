"""Audits of blocks that peers put, beside the traffic; until then the blocks are not visible."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from ctxreuse.block.format import BlockView, parse
from ctxreuse.bus.log_limit import LimitedLog
from ctxreuse.fair import Shares, Turns
from ctxreuse.identity.keys import ROOT
from ctxreuse.store.base import Store
from ctxreuse.store.types import Entry

__all__ = ["Audit", "AuditResult", "AuditRun", "Auditor", "Given", "StoreAudit", "Verdict"]

limited = LimitedLog(logging.getLogger(__name__))

#: ``unaudited``: nothing can be said here of these; ``failed``: the audit could not be run.
Verdict: TypeAlias = Literal["sound", "false", "unaudited", "failed"]
#: (space digest, blocks of it that follow each other or not, or one state) -> whether they are what the model computes;
#: None: nothing can be said. Called in a thread of its own; an exception is an audit that failed.
Audit: TypeAlias = Callable[[bytes, Sequence[BlockView]], bool | None]
#: (space digest, keys of a stored context, first block to audit, state to audit) -> as `Audit`; see `audit_stored`.
AuditRun: TypeAlias = Callable[[bytes, Sequence[bytes], int, BlockView | None], bool | None]

_BATCH = 32
_FLUSH = 60.0


class StoreAudit:
    """An `Audit` of blocks that are stored, on top of those that they follow.

    Args:
        store: Where they are; ``run`` reads them there.
        run: Computes.
        reach: Tokens between a state and the one before it (or the start) that may be computed to audit it.
    """

    def __init__(self, store: Store, run: AuditRun, *, reach: int) -> None:
        self._store, self._run, self._reach = store, run, reach

    def __call__(self, space: bytes, views: Sequence[BlockView]) -> bool | None:
        """See `Audit`. Raises StoreError, LookupError, and what ``run`` raises."""
        self._store.flush(_FLUSH)
        if views[0].header.kind == "state":
            return self._audit_state(space, views[0])
        verdict: bool | None = True
        start = 0
        for end in range(1, len(views) + 1):
            if end < len(views) and views[end].header.parent == views[end - 1].header.key:
                continue
            before = self._path(views[start].header.parent)
            keys = [*(entry.key for entry in before), *(view.header.key for view in views[start:end])]
            found = self._run(space, keys, len(before), None)
            if found is False:
                return False
            verdict, start = verdict and found, end
        return verdict

    def _audit_state(self, space: bytes, state: BlockView) -> bool | None:
        path = self._path(state.header.key)
        for first in range(len(path) - 1, -1, -1):
            if path[-1].end - (path[first - 1].end if first else 0) > self._reach:
                return None
            if not first or path[first - 1].has_state:
                return self._run(space, [entry.key for entry in path], first, state)
        return None

    def _path(self, key: bytes) -> list[Entry]:
        """The stored blocks up to ``key``, the first block first. Raises LookupError."""
        path: list[Entry] = []
        while key != ROOT:
            entry = self._store.entries([key])[0]
            if entry is None:
                raise LookupError("what an audited block follows is not stored")
            path.append(entry)
            key = entry.parent
        return path[::-1]


class Given(NamedTuple):
    """A sealed block or state that a peer of ``tenant`` gave, to be audited; ``giver``: see `giver_id`."""

    tenant: str
    user: str
    giver: bytes
    key: bytes
    space: bytes
    data: memoryview
    state: bool


class AuditResult(NamedTuple):
    """Blocks of one user, or one state (``data``: its bytes), and the verdict."""

    user: str
    giver: bytes
    keys: tuple[bytes, ...]
    verdict: Verdict
    data: memoryview | None = None


class Auditor:
    """Queues of ``limit`` bytes of blocks at most and the thread that audits them, tenants in turn. For any thread.

    The thread runs while there is something to audit. ``alone``: see `Shares`.
    """

    def __init__(self, audit: Audit, *, limit: int, alone: Callable[[], bool] = lambda: False) -> None:
        self._audit = audit
        self._changed = threading.Condition()
        self._queues: dict[str, deque[Given]] = {}
        self._turns, self._shares = Turns[str](), Shares[str](limit, alone)
        self._results: list[AuditResult] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def has_room(self, tenant: str, nbytes: int) -> bool:
        """Return False if too much waits to be audited, of this tenant or of all."""
        with self._changed:
            return not self._closed and self._shares.fits(tenant, nbytes)

    def put(self, given: Given) -> None:
        """Queue a block or state; never blocks. One that comes after `close` has no result."""
        with self._changed:
            if self._closed:
                return
            self._queues.setdefault(given.tenant, deque()).append(given)
            self._shares.take(given.tenant, len(given.data))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ctxreuse-audit", daemon=True)
                self._thread.start()

    def results(self) -> list[AuditResult]:
        """Return the results since the last call."""
        if not self._results:
            return []
        with self._changed:
            found, self._results = self._results, []
            return found

    def wait(self, timeout: float) -> bool:
        """Wait until the queue is empty; returns False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._shares.taken, timeout)

    def close(self) -> None:
        """Drop what waits and end the thread."""
        with self._changed:
            self._closed = True
            for tenant, waiting in self._queues.items():
                self._shares.give_back(tenant, sum(len(given.data) for given in waiting))
            self._queues.clear()
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
            verdict: Verdict = "failed"
            try:
                found = self._audit(batch[0].space, [parse(given.data) for given in batch])
                verdict = "unaudited" if found is None else "sound" if found else "false"
            except Exception:
                if self._closed:
                    return  # the engine has been closed before: these stay without a result
                # Not the peer's fault as far as known, and no reason to believe it either.
                limited.write(
                    batch[0].user, logging.ERROR, "an audit of blocks failed; they are not kept", exc_info=True
                )
            keys, data = tuple(given.key for given in batch), batch[0].data if batch[0].state else None
            with self._changed:
                self._results.append(AuditResult(batch[0].user, batch[0].giver, keys, verdict, data))
                self._shares.give_back(batch[0].tenant, sum(len(given.data) for given in batch))
                self._changed.notify_all()

    def _take(self) -> list[Given]:
        batch: list[Given] = []
        if not self._queues:
            return batch
        tenant = self._turns.order(self._queues)[0]
        queue = self._queues[tenant]
        while queue and len(batch) < _BATCH:
            one = queue[0]
            if batch and (batch[0].state or one.state or one[:3] != batch[0][:3] or one.space != batch[0].space):
                break
            batch.append(queue.popleft())
        if not queue:
            del self._queues[tenant]
        self._turns.charge(tenant, sum(len(given.data) for given in batch))
        return batch
