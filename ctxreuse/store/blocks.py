"""Blocks and states on disk: an LMDB environment as a cache of bounded size that may lose anything but never lies."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import lmdb

from ctxreuse.errors import StoreClosedError, StoreError
from ctxreuse.levels import EXACT, short
from ctxreuse.store.base import Buffer, Coder, Kind, Progress, StoreStats
from ctxreuse.store.coding import Coders, check_level
from ctxreuse.store.demoting import Demoter
from ctxreuse.store.env import CACHE_MAP, DISK_ERRORS, Env, broken
from ctxreuse.store.guided import GuidedStore, recall
from ctxreuse.store.index import Index, Plan
from ctxreuse.store.intake import Intake
from ctxreuse.store.owner import Owner, claim, folder
from ctxreuse.store.policy import Policy, make_policy
from ctxreuse.store.put import Put
from ctxreuse.store.reader import DiskReader
from ctxreuse.store.readonly import counts, open_readonly
from ctxreuse.store.recovery import compare, corrupt, open_cache, write_plan
from ctxreuse.store.tally import Tally
from ctxreuse.store.writer import Writer, closer

__all__ = ["BlockStore"]

log = logging.getLogger(__name__)

_BACKOFF = 5.0


class BlockStore(GuidedStore):
    """The disk tier (see ``Store`` and ``StoreAdmin``). One process writes; others open with ``readonly=True``.

    Use ``open``. Writing is asynchronous, in one thread; a commit is seen by readers of all processes at once and is
    on disk after the next sync (about a second) or ``close``. Trouble with the disk costs entries, never an exception
    in ``match``, ``put`` or a reader's ``block``.
    """

    def __init__(
        self,
        env: Env,
        index: Index,
        owner: Owner | None,
        recovered: str,
        queue: int,
        clock: Callable[[], float],
        level: str = EXACT,
        demote: bool = True,
    ) -> None:
        super().__init__(env, index, owner)
        self._recovered, self._clock = recovered, clock
        self._tally = Tally()
        self._intake, self._coders = Intake(index), Coders(level)
        self._demoter = Demoter(env, index, self._coders, self._lock) if demote else None
        self._doomed: list[bytes] = []
        self._retry_at = float("-inf")
        self._dirty = self._closed = False
        self._listeners: list[Callable[[Sequence[tuple[Kind, bytes]]], None]] = []
        self._writer: Writer[Put | None] | None = None
        _opened.add(self)
        if owner is not None:
            # LMDB reuses pages two commits later, so large batches make the file larger and not faster: at 295 MB held,
            # batches of 256 MB led to a file of 2.3 times that, of 16 to 32 MB to 1.1 to 1.2 times.
            batch_bytes = max(1, min(32 << 20, index.capacity // 16))
            self._writer = Writer(self._commit, self._tick, limit_bytes=queue, batch_bytes=batch_bytes)
            # A program that forgets close() still gets its queue written.
            self._at_exit = closer(weakref.ref(self))
            atexit.register(self._at_exit)
            over = index.shrink()
            self._tally.evicted += len(over)
            self.gone_book.open()
            if recovered == "rebuilt":
                self.gone_book.left((), "dropped", recovered)
            self._doom(over, "capacity", "evicted")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        capacity: int = 8_000_000_000,
        policy: str | Policy[bytes] = "duel",
        readonly: bool = False,
        clock: Callable[[], float] = time.time,
        queue_bytes: int = 256 << 20,
        map_size: int = CACHE_MAP,
        boot: str | None = None,
        progress: Progress | None = None,
        level: str = EXACT,
        demote: bool = True,
    ) -> BlockStore:
        """Open the cache in folder ``path`` (its files lie in ``path/blocks``), creating it if need be.

        ``capacity``: bytes of whole pages that values may take; lowering it evicts at once. ``queue_bytes``:
        puts that may wait. ``boot`` stands in for the machine's boot id. ``level``: at which blocks are kept where
        their owner allows it and a coder is there (`adopt`); ``demote``: encode what is cold smaller before anything is
        evicted. Raises StoreOwnedError while another process writes here, StoreError for a path that cannot hold a
        store, ConfigError for an unknown level.
        """
        check_level(level)
        place = folder(path, readonly=readonly)
        home = place / "blocks"
        index = Index(capacity, make_policy(policy, capacity), clock)
        if readonly:
            return cls(open_readonly(home, map_size), index, None, "", queue_bytes, clock)
        owner = claim(place, "blocks", boot=boot, clock=clock)
        try:
            before = owner.before("blocks")
            same = owner.same_boot("blocks")
            env, recovered = open_cache(home, map_size, index, clean=before.clean, same_boot=same, progress=progress)
            recall(env, index.policy)
        except BaseException:
            owner.end("blocks", clean=False)
            raise
        return cls(env, index, owner, recovered, queue_bytes, clock, level, demote)

    @contextlib.contextmanager
    def read(self, lossy: str | None = None) -> Iterator[DiskReader]:
        with self._env.read() as txn:
            reader = DiskReader(txn, self._env.tables, self._miss, lossy)
            try:
                yield reader
            finally:
                reader.release()
                with self._lock:
                    self._tally.hits += len(reader.used)
                    if self._owner is not None:
                        self._index.limit(reader.used, lossy)
                        self._index.touch(reader.used)

    def _miss(self, key: bytes, reason: str) -> None:
        with self._lock:
            self._tally.misses[reason] += 1
        if reason not in ("absent", "level"):
            log.warning("entry %s is %s and counts as a miss", key.hex()[:16], reason)
            self.drop(key, reason)

    def _trouble(self, error: BaseException) -> None:
        with self._lock:
            self._tally.errors["damaged" if broken(error) else "disk" if _full(error) else "other"] += 1
        if not isinstance(error, StoreClosedError):
            log.warning("the cache at %s failed: %s", self._env.path, error)

    def put(
        self,
        key: bytes,
        data: Buffer,
        *,
        kind: Kind = "block",
        replace: bool = False,
        lossy: str | None = None,
        wait: float = 0.05,
    ) -> bool:
        """See ``Store.put``; waits at most ``wait`` seconds for room in the queue."""
        item = Put.parse(key, data, kind, replace, lossy)
        if item is None:
            return self._refuse("malformed", key)
        resting = self._coders.resting(item)
        with self._lock:
            reason = self._unfit(resting)
            if reason == "duplicate":
                self._tally.duplicates += 1
                return True
            if reason:
                return self._refuse(reason, key)
            self._intake.take(resting)
        if self._writer is not None and self._writer.put(item, item.size, wait):
            return True
        with self._lock:
            self._intake.done(item)
        return self._refuse("closed" if self._closed else "queue_full", key)

    def _refuse(self, reason: str, key: bytes) -> bool:
        with self._lock:
            self._tally.refused[reason] += 1
        self.gone_book.left([key], "refused", reason)
        return False

    def queued(self, kind: Kind, key: bytes) -> bool:
        """True while a put of this key waits to be committed."""
        with self._lock:
            return (kind, key) in self._intake

    def adopt(self, coder: Coder) -> None:
        """See ``StoreAdmin.adopt``."""
        self._coders.adopt(coder)
        if self._demoter is not None:
            self._demoter.retry()

    def _unfit(self, put: Put) -> str:
        if self._owner is None:
            return "readonly"
        if self._closed:
            return "closed"
        if put.size > self._index.capacity:
            return "too_big"
        return "backoff" if self._resting() else self._intake.unfit(put)

    def pin(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return self._index.tree.pin(keys)

    def unpin(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return self._index.tree.unpin(keys)

    def drop(self, key: bytes, reason: str) -> None:
        with self._lock:
            gone = self._index.drop(key) if self._owner is not None else []
            self._tally.drop(len(gone), reason, "below")
        self._doom(gone, reason)

    def forget(self, keys: Sequence[bytes]) -> int:
        self.flush()
        with self._lock:
            gone = self._index.forget(keys) if self._owner is not None else []
            self._tally.dropped["forgotten"] += len(gone)
        self._doom(gone, "forgotten")
        return len(gone)

    def _doom(self, gone: list[bytes], why: str, how: Literal["evicted", "dropped"] = "dropped") -> None:
        """What left the tree leaves the disk with the next batch; an empty item wakes the writer for it."""
        self._tell(gone)
        if gone:
            self.gone_book.left(gone, how, why)
        if gone and self._writer is not None:
            with self._lock:
                self._doomed += gone
            self._writer.put(None, 0, 0.0)

    def subscribe(self, listener: Callable[[Sequence[tuple[Kind, bytes]]], None]) -> None:
        """Call ``listener`` in the writer's thread with what each batch committed. It must be quick and not raise."""
        self._listeners.append(listener)

    def _commit(self, items: list[Put | None]) -> None:
        puts = [self._coders.encoded(item) for item in items if item is not None]
        if self._demoter is not None and self._coders:
            self._demote(self._demoter, puts)
        with self._lock:
            plan = self._index.plan(puts, self._tally.refused)
            doomed, self._doomed = self._doomed, []
        error = self._write(plan, doomed)
        with self._lock:
            for put in puts:
                self._intake.done(put)
            if error is None:
                self._doomed += self._index.settle(plan)
                self._tally.puts += len(plan.puts)
                self._tally.evicted += len(plan.evicted) + len(plan.stripped)
                self.gone_book.committed(puts, plan, self._index.policy, self._index.tree)
            else:
                self._doomed += doomed + self._index.restore(plan)
                self._tally.refused["disk"] += len(plan.puts)
                self._retry_at = self._clock() + _BACKOFF
        if error is not None:
            self._trouble(error)
            return
        self._tell([*plan.records, *(gone.key for gone in (*plan.evicted, *plan.stripped))])
        written = [(put.kind, put.key) for put in plan.puts]
        for listener in self._listeners:
            listener(written)

    def _demote(self, demoter: Demoter, puts: Sequence[Put]) -> None:
        try:
            for changed in demoter.make_room(puts):
                self._dirty = True
                with self._lock:
                    self._tally.demoted.update(f"{short(one.before)}>{short(one.to)}" for one in changed)
                self._tell([one.key for one in changed])
        except (lmdb.Error, StoreError, ValueError) as error:
            self._trouble(error)  # the puts will find less room, or the same trouble

    def _write(self, plan: Plan, doomed: list[bytes]) -> Exception | None:
        """One transaction for all of it; the error if nothing of it was done."""
        if not (plan.puts or plan.evicted or plan.stripped or plan.records or doomed):
            return None
        try:
            write_plan(self._env, plan, doomed)
        except (lmdb.Error, StoreError) as error:
            return error
        self._dirty = True
        return None

    def _tick(self) -> bool:
        if self._dirty and not self._resting():
            self._save()
        return self._dirty

    def _resting(self) -> bool:
        """True for a while after a failed commit; a clock that was set back does not make it longer."""
        return 0 < self._retry_at - self._clock() <= _BACKOFF

    def _save(self) -> None:
        """Renewed records, then everything to disk."""
        with self._lock:
            renewed = self._index.renewals()
            doomed, self._doomed = self._doomed, []
        error = self._write(Plan([], [], renewed, set()), doomed)
        if error is not None:
            with self._lock:
                self._doomed += doomed
        try:
            self._env.write(self._note_learnt)
            self._env.sync()
            self._dirty = False
            self._env.free_readers()
        except (lmdb.Error, StoreError) as failed:
            error = failed
        if error is not None:
            self._retry_at = self._clock() + _BACKOFF
            self._trouble(error)

    def flush(self, timeout: float | None = None) -> None:
        if self._writer is not None and not self._writer.flush(timeout):
            raise StoreError(f"puts are still queued after {timeout} s", where=str(self._env.path), fix="Wait longer")

    def stats(self) -> StoreStats:
        with self._lock:
            tree = self._index.tree
            held = len(tree), self._index.states, tree.nbytes
            return self._tally.stats(
                held=counts(self._env) if self._owner is None and not self._closed else held,
                tokens=tree.tokens,
                capacity=self._index.capacity,
                queued=self._writer.queued if self._writer is not None else (0, 0),
                file_bytes=self._env.file_bytes(),
                recovered=self._recovered,
                levels=tree.levels,
                standing=self._standing(),
            )

    def verify(self, progress: Progress | None = None) -> list[tuple[bytes, str]]:
        """Keys whose values fail their checksums, with what is wrong. Reads everything; changes nothing."""
        return corrupt(self._env, progress)

    def check(self) -> None:
        """See ``StoreAdmin.check``. Waits for the queue first, so that memory and disk can be compared."""
        self.flush()
        with self._lock:
            self._index.check()
            if self._owner is None:
                return
            compare(self._index, self._env, set(self._doomed))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        clean = False
        try:
            if self._writer is not None:
                self._writer.close()
                self._save()
                clean = not self._dirty
            self._env.close()
        except BaseException:
            self._closed = False
            raise
        self._close_notes()
        if self._owner is not None:
            atexit.unregister(self._at_exit)
            self._owner.end("blocks", clean=clean)

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_opened: weakref.WeakSet[BlockStore] = weakref.WeakSet()


def _abandon() -> None:
    # A forked child has no writer thread, and locks may be held by threads that it does not have either.
    for store in _opened:
        store._lock, store._writer, store._closed = threading.RLock(), None, True


os.register_at_fork(after_in_child=_abandon)


def _full(error: BaseException) -> bool:
    return getattr(error, "code", 0) in DISK_ERRORS
