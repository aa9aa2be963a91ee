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
from typing import ClassVar, Literal, Unpack

import lmdb
import msgspec

from ctxreuse.block.format import Buffer, Kind
from ctxreuse.block.levels import family
from ctxreuse.config import StoreConfig
from ctxreuse.errors import StoreClosedError, StoreError, StoreReadOnlyError
from ctxreuse.identity.keys import ROOT
from ctxreuse.store.base import BlockCodec
from ctxreuse.store.blocks.contents import Contents
from ctxreuse.store.blocks.counters import StoreCounters
from ctxreuse.store.blocks.index import Index, Plan
from ctxreuse.store.blocks.learnt import load_learnt, save_learnt, sealed
from ctxreuse.store.blocks.pending import PendingPuts, Put
from ctxreuse.store.blocks.reader import DiskReader
from ctxreuse.store.blocks.recompress import BlockCodecs, Recompressor, check_level
from ctxreuse.store.blocks.recovery import compare, open_cache, open_readonly
from ctxreuse.store.blocks.tables import corrupt, counts, givers, write_plan
from ctxreuse.store.blocks.writer import Writer
from ctxreuse.store.chunks.index import FOLDER, ChunkIndex, chunk_limit
from ctxreuse.store.listeners import KeyListeners
from ctxreuse.store.lmdb.env import CACHE_MAP, DISK_ERRORS, Env, broken, explain
from ctxreuse.store.lmdb.owner import Owner, claim, folder
from ctxreuse.store.lmdb.rewrite import rewrite
from ctxreuse.store.policy import make_policy
from ctxreuse.store.removals import FILE, RemovalLog
from ctxreuse.store.runs import ContextRuns
from ctxreuse.store.types import Entry, Holding, Progress, Removal, StoreOptions, StoreStats
from ctxreuse.tree import Match

__all__ = ["BlockStore"]

log = logging.getLogger(__name__)

_OPEN = "Ask the process that owns the store"
#: Seconds without writing after a failed commit.
_BACKOFF = 5.0
#: Values that are offered again at once when a disk has room again.
_RETRIED = 64


class BlockStore:
    """The disk tier; see `Store`. One process writes; others open it with ``readonly=True``.

    Use `open`. One thread writes, asynchronously; a commit is visible to readers of all processes at once and on disk
    after the next sync (about a second) or `close`. Disk errors cost entries, never an exception in `match`, `put` or
    `Reader.block`. A store opened for reading only answers from the newest commit, accepts no put and logs no removal.
    """

    #: Bytes of puts that may wait to be written.
    QUEUE_BYTES: ClassVar[int] = 256 << 20

    def __init__(self, env: Env, index: Index, owner: Owner | None, recovered: str, config: StoreConfig) -> None:
        self._env, self._index, self._owner, self._recovered = env, index, owner, recovered
        self._clock = index.clock
        self._lock = threading.RLock()
        place = env.path.parent
        self.removals = RemovalLog(place / FILE if owner is not None else None, clock=index.clock)
        self.chunks = ChunkIndex.open(
            place / FOLDER,
            most=chunk_limit(index.capacity),
            readonly=owner is None,
            crashed=owner is not None and not owner.before("blocks").clean and owner.same_boot("blocks"),
        )
        self._counters = StoreCounters()
        self._pending, self._codecs = PendingPuts(index.tree), BlockCodecs(config.level)
        self._contents = Contents(env, index, self._lock, self._note_error, readonly=owner is None)
        self._recompressor = Recompressor(env, index, self._codecs, self._lock) if config.recompress else None
        #: Keys that left the tree and are deleted with the next batch.
        self._doomed: list[bytes] = []
        self._retry_at = float("-inf")
        self._dirty = self._closed = self._failing = False
        self._key_listeners = KeyListeners()
        self._commit_listeners: list[Callable[[Sequence[tuple[Kind, bytes]]], None]] = []
        self._failed_listeners: list[Callable[[Sequence[tuple[Kind, bytes]]], None]] = []
        self._retry_listeners: list[Callable[[int], bool]] = []
        self._writer: Writer[Put | None] | None = None
        _opened.add(self)
        if owner is not None:
            # LMDB reuses pages two commits later, so large batches make the file larger and not faster: at 295 MB,
            # batches of 256 MB led to a file of 2.3 times that, of 16 to 32 MB to 1.1 to 1.2 times.
            batch_bytes = max(1, min(32 << 20, index.capacity // 16))
            self._writer = Writer(self._commit, self._tick, limit_bytes=self.QUEUE_BYTES, batch_bytes=batch_bytes)
            # A program that forgets close() still gets its queue written.
            self._at_exit = _closer(weakref.ref(self))
            atexit.register(self._at_exit)
            over = index.shrink()
            self._counters.evicted += len(over)
            self.removals.open()
            if recovered == "rebuilt":
                self.removals.add((), "dropped", recovered)
            self._doom(over, "capacity", "evicted")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | StoreConfig,
        *,
        readonly: bool = False,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.time,
        boot: str | None = None,
        map_size: int = CACHE_MAP,
        **options: Unpack[StoreOptions],
    ) -> BlockStore:
        """Open the cache in a store's folder (its files lie in ``blocks``), creating it if need be.

        Args:
            path: the folder, or the store's settings.
            readonly: open beside the process that writes.
            progress: called as entries are verified after a crash.
            clock: seconds since 1970.
            boot: the machine's boot id, if not the real one.
            map_size: bytes of address space.
            options: settings that differ, such as ``capacity=4 << 30``; lowering the capacity evicts at once.

        Raises:
            StoreOwnedError: another process writes here.
            StoreError: the path cannot hold a store.
            ConfigError: an unknown level or policy.
        """
        config = path if isinstance(path, StoreConfig) else StoreConfig(path=os.fspath(path))
        config = msgspec.structs.replace(config, **options)
        check_level(config.level)
        place = folder(config.folder(), readonly=readonly)
        home = place / "blocks"
        index = Index(config.capacity, make_policy(config.policy, config.capacity), clock)
        if readonly:
            return cls(open_readonly(home, map_size), index, None, "", config)
        owner = claim(place, "blocks", boot=boot, clock=clock)
        try:
            before = owner.before("blocks")
            same = owner.same_boot("blocks")
            env, recovered = open_cache(home, map_size, index, clean=before.clean, same_boot=same, progress=progress)
            load_learnt(env, index.policy)
        except BaseException:
            owner.end("blocks", clean=False)
            raise
        return cls(env, index, owner, recovered, config)

    # ---- What is stored --------------------------------------------------------------------------------------

    @property
    def readonly(self) -> bool:
        """True if this process only reads."""
        return self._owner is None

    def match(self, keys: Sequence[bytes], max_kl: float | None = None) -> Match:
        return self._contents.match(keys, max_kl)

    def holdings(self, keys: Sequence[bytes]) -> list[Holding | None]:
        """Return what is stored under each key, or None. Pure."""
        return self._contents.holdings(keys)

    def walk(self) -> Iterator[Entry]:
        return self._contents.walk()

    def runs(self, keys: Sequence[bytes] = ()) -> tuple[ContextRuns, list[int]]:
        """Return the stored runs, and the number of the run of each key; see `ctxreuse.store.runs`."""
        return self._contents.runs(keys)

    def recent(self) -> list[bytes]:
        return self._contents.recent()

    def entries(self, keys: Sequence[bytes]) -> list[Entry | None]:
        return self._contents.entries(keys)

    def givers(self) -> dict[bytes, bytes]:
        try:
            return givers(self._env)
        except (lmdb.Error, StoreError) as error:
            self._note_error(error)
            return {}

    def removal(self, key: bytes) -> Removal | None:
        return self.removals.removal(key)

    def watch(self, listener: Callable[[Sequence[bytes]], None]) -> Callable[[], None]:
        return self._key_listeners.add(listener)

    def subscribe(self, listener: Callable[[Sequence[tuple[Kind, bytes]]], None]) -> None:
        """Call ``listener`` in the writer's thread with what each batch committed. It must be quick and not raise."""
        self._commit_listeners.append(listener)

    def on_failure(self, failed: Callable[[Sequence[tuple[Kind, bytes]]], None], retry: Callable[[int], bool]) -> None:
        """Call ``failed`` with what a batch could not commit, and ``retry`` about each second until it returns False.

        ``retry(most)`` may offer up to ``most`` values again: one while the disk fails, to see whether there is room.
        Both run in the writer's thread and must not raise.
        """
        self._failed_listeners.append(failed)
        self._retry_listeners.append(retry)

    @property
    def failing(self) -> bool:
        """True since a write failed, until one succeeds."""
        return self._failing

    @contextlib.contextmanager
    def read(self, max_kl: float | None = None) -> Iterator[DiskReader]:
        with self._env.read() as txn:
            reader = DiskReader(txn, self._env.tables, self._miss, max_kl)
            try:
                yield reader
            finally:
                reader.release()
                with self._lock:
                    self._counters.hits += len(reader.used)
                    if self._owner is not None:
                        self._index.limit(reader.used, max_kl)
                        self._index.touch(reader.used)

    def _miss(self, key: bytes, reason: str) -> None:
        with self._lock:
            self._counters.misses[reason] += 1
        if reason not in ("absent", "level"):
            log.warning("entry %s is %s and counts as a miss", key.hex()[:16], reason)
            self.drop(key, reason)

    def _note_error(self, error: BaseException) -> None:
        kind = "damaged" if broken(error) else "disk" if getattr(error, "code", 0) in DISK_ERRORS else "other"
        with self._lock:
            self._counters.errors[kind] += 1
        if not isinstance(error, StoreClosedError):
            log.warning("the cache at %s failed: %s", self._env.path, error)

    # ---- Changes ---------------------------------------------------------------------------------------------

    def put(
        self,
        key: bytes,
        data: Buffer,
        *,
        kind: Kind = "block",
        replace: bool = False,
        max_kl: float | None = None,
        giver: bytes = b"",
        wait: float = 0.05,
    ) -> bool:
        """See `Store.put`; waits at most ``wait`` seconds for room in the queue."""
        item = Put.parse(key, data, kind, replace, max_kl, giver)
        return self.refuse("malformed", key) if item is None else self.put_parsed(item, wait)

    def put_parsed(self, item: Put, wait: float = 0.05) -> bool:
        """Queue a parsed value; see `put`."""
        return not self.offer(item, wait)

    def offer(self, item: Put, wait: float = 0.05) -> str:
        """Queue a parsed value; returns why it is refused, "" if it is not."""
        target = item._replace(level=self._codecs.target(item))
        with self._lock:
            reason = self._reason_against(target)
            if reason == "duplicate":
                self._index.limit([item.key], item.max_kl)
                self._index.touch([item.key])
                self._counters.duplicates += 1
                return ""
            if not reason:
                self._pending.add(target)
        if not reason:
            if self._writer is not None and self._writer.put(item, item.size, wait):
                return ""
            with self._lock:
                self._pending.remove(item)
            reason = "closed" if self._closed else "queue_full"
        self.refuse(reason, item.key)
        return reason

    def _reason_against(self, put: Put) -> str:
        if self._owner is None:
            return "readonly"
        if self._closed:
            return "closed"
        if put.size > self._index.capacity:
            return "too_big"
        return "backoff" if self._backs_off() else self._pending.reason_against(put)

    def refuse(self, reason: str, key: bytes) -> bool:
        """Count a value that is not stored, and log why; returns False."""
        with self._lock:
            self._counters.refused[reason] += 1
        self.removals.add([key], "refused", reason)
        return False

    def queued(self, kind: Kind, key: bytes) -> bool:
        """Return True while a put of this key waits to be committed."""
        with self._lock:
            return (kind, key) in self._pending

    def pin(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return self._index.tree.pin(keys)

    def unpin(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return self._index.tree.unpin(keys)

    def drop(self, key: bytes, reason: str) -> None:
        with self._lock:
            removed = self._index.drop(key) if self._owner is not None else []
            for i in range(len(removed)):
                self._counters.dropped["below" if i else reason] += 1
        self._doom(removed, reason)

    def forget(self, keys: Sequence[bytes]) -> int:
        self.flush()
        with self._lock:
            removed = self._index.forget(keys) if self._owner is not None else []
            self._counters.dropped["forgotten"] += len(removed)
        self._doom(removed, "forgotten")
        return len(removed)

    def _doom(self, removed: list[bytes], why: str, how: Literal["evicted", "dropped"] = "dropped") -> None:
        """Delete what left the tree with the next batch; an empty item wakes the writer for it."""
        self._key_listeners.notify(removed)
        if removed:
            self.removals.add(removed, how, why)
        if removed and self._writer is not None:
            with self._lock:
                self._doomed += removed
            self._writer.put(None, 0, 0.0)

    def touch(self, keys: Sequence[bytes], *, partial: bool = False) -> None:
        with self._lock:
            self._index.touch(keys, partial)

    def on_lookup(self, keys: Sequence[bytes], tokens: int) -> None:
        with self._lock:
            self._index.on_lookup(keys, tokens)

    def on_pause(self, keys: Sequence[bytes], label: int) -> None:
        with self._lock:
            self._index.on_pause(keys, label)

    def set_recompute_cost(self, per_token: float, per_pair: float) -> None:
        with self._lock:
            self._index.policy.set_recompute_cost(per_token, per_pair)

    def share_by(self, over: Callable[[int], Callable[[bytes], bool] | None]) -> None:
        with self._lock:
            self._index.over = over

    def register_codec(self, codec: BlockCodec) -> None:
        self._codecs.register(codec)
        if self._recompressor is not None:
            self._recompressor.retry()

    # ---- The writer's thread ---------------------------------------------------------------------------------

    def _commit(self, items: list[Put | None]) -> None:
        waiting = [item for item in items if item is not None]
        with self._lock:
            if waiting and self._backs_off():
                # Queued before the commit that failed; written now, they would be orphans of what that one lost.
                self._counters.refused["backoff"] += len(waiting)
                refused, waiting = waiting, []
                for put in refused:
                    self._pending.remove(put)
            else:
                refused = []
        if refused:
            self.removals.add([put.key for put in refused if put.kind == "block"], "refused", "backoff")
            for failed in self._failed_listeners:
                failed([put.name for put in refused])
        puts = [self._codecs.encoded(item) for item in waiting]
        if self._recompressor is not None and self._codecs:
            self._recompress(self._recompressor, puts)
        with self._lock:
            plan = self._index.plan(puts, self._counters.refused)
            doomed, self._doomed = self._doomed, []
        error = self._write(plan, doomed)
        with self._lock:
            for put in puts:
                self._pending.remove(put)
            if error is None:
                self._doomed += self._index.settle(plan)
                self._counters.puts += len(plan.puts)
                self._counters.evicted += len(plan.evicted) + len(plan.stripped)
                self._log_removals(puts, plan)
            else:
                self._doomed += doomed + self._index.restore(plan)
                self._counters.refused["disk"] += len(plan.puts)
                self._retry_at = self._clock() + _BACKOFF
                self._failing = True
        if error is not None:
            self._note_error(error)
            lost = [put.key for put in plan.puts if put.kind == "block"]
            if lost:
                self.removals.add(lost, "refused", "disk")
            for failed in self._failed_listeners:
                failed([put.name for put in puts])
            return
        if plan.puts:
            self._failing = False
        self._key_listeners.notify([*plan.records, *(removed.key for removed in (*plan.evicted, *plan.stripped))])
        written = [put.name for put in plan.puts]
        for listener in self._commit_listeners:
            listener(written)

    def _log_removals(self, puts: Sequence[Put], plan: Plan) -> None:
        """Log what a committed plan evicted, and which of ``puts`` it did not store."""
        tree = self._index.tree
        if plan.evicted:
            by = plan.puts[0].key if plan.puts else b""
            evicted = [removed.key for removed in plan.evicted]
            self.removals.add(evicted, "evicted", self._index.policy.description, by)
        reasons: dict[str, list[bytes]] = {}
        for put in puts:
            if put.kind == "block" and put.key not in tree:
                reason = "no_room" if put.parent == ROOT or put.parent in tree else "orphan"
                reasons.setdefault("declined" if put.key in plan.declined else reason, []).append(put.key)
        for why, keys in reasons.items():
            self.removals.add(keys, "refused", why)

    def _recompress(self, recompressor: Recompressor, puts: Sequence[Put]) -> None:
        try:
            for changed in recompressor.make_room(puts):
                self._dirty = True
                with self._lock:
                    self._counters.recompressed.update(f"{family(one.before)}>{family(one.after)}" for one in changed)
                self._key_listeners.notify([one.key for one in changed])
        except (lmdb.Error, StoreError, ValueError) as error:
            self._note_error(error)  # the puts will find less room, or the same error

    def _write(self, plan: Plan, doomed: list[bytes]) -> Exception | None:
        """Commit all of it in one transaction; returns the error if none of it was."""
        if not (plan.puts or plan.evicted or plan.stripped or plan.records or doomed):
            return None
        try:
            write_plan(self._env, plan, doomed)
        except (lmdb.Error, StoreError) as error:
            return error
        self._dirty = True
        return None

    def _tick(self) -> bool:
        if self._backs_off():
            return True
        if self._dirty:
            self._save()
        owed = [retry(1 if self._failing else _RETRIED) for retry in self._retry_listeners]
        if not any(owed) and not self._dirty:
            self._failing = False  # nothing is left to try it with
        return self._dirty or any(owed)

    def _backs_off(self) -> bool:
        """Return True for a while after a failed commit; a clock that was set back does not make it longer."""
        return 0 < self._retry_at - self._clock() <= _BACKOFF

    def _save(self) -> None:
        """Write renewed records and what the policy learnt, then sync."""
        with self._lock:
            renewed = self._index.renewals()
            doomed, self._doomed = self._doomed, []
        error = self._write(Plan([], [], renewed, set()), doomed)
        if error is not None:
            with self._lock:
                self._doomed += doomed
        try:
            with self._lock:
                learnt = sealed(self._index.policy)
            save_learnt(self._env, learnt)
            self._env.sync()
            self._dirty = False
            self._env.free_readers()
        except (lmdb.Error, StoreError) as failed:
            error = failed
        if error is not None:
            self._retry_at = self._clock() + _BACKOFF
            self._failing = True
            self._note_error(error)

    # ---- The whole -------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        if self._writer is not None and not self._writer.flush(timeout):
            raise StoreError(f"puts are still queued after {timeout} s", where=str(self._env.path), fix="Wait longer")

    def compact(self, progress: Progress | None = None) -> None:
        """Rewrite the file: what was deleted is in no page of it. Reads go on meanwhile, puts wait.

        Raises StoreFullError without room for both files, StoreError.
        """
        if self._owner is None:
            raise StoreReadOnlyError("the cache was opened for reading", where=str(self._env.path), fix=_OPEN)
        self.flush()
        with self._lock:
            doomed, self._doomed = self._doomed, []
        error = self._write(Plan([], [], {}, set()), doomed)
        if error is None:
            try:
                rewrite(self._env, progress=progress)
            except StoreError as failed:
                error = failed
        else:
            with self._lock:
                self._doomed += doomed
        if error is not None:
            self._note_error(error)
            raise (error if isinstance(error, StoreError) else explain(error, self._env.path)) from None

    def stats(self) -> StoreStats:
        with self._lock:
            tree = self._index.tree
            sizes = len(tree), tree.states, tree.nbytes
            queued, queued_bytes = self._writer.queued if self._writer is not None else (0, 0)
            return self._counters.stats(
                sizes=counts(self._env) if self._owner is None and not self._closed else sizes,
                tokens=tree.tokens,
                capacity=self._index.capacity,
                queued=queued,
                queued_bytes=queued_bytes,
                file_bytes=self._env.file_bytes(),
                recovered=self._recovered,
                failing=self._failing,
                levels=tree.levels,
                policy=self._index.policy.stats,
            )

    def verify(self, progress: Progress | None = None) -> list[tuple[bytes, str]]:
        """Return the keys whose values fail their checksums, with the error. Reads all values; changes nothing."""
        return corrupt(self._env, progress)

    def check(self) -> None:
        self.flush()  # so that memory and disk can be compared
        with self._lock:
            self._index.check()
            if self._owner is not None:
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
        self.removals.close()
        self.chunks.close()
        if self._owner is not None:
            atexit.unregister(self._at_exit)
            self._owner.end("blocks", clean=clean)

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_opened: weakref.WeakSet[BlockStore] = weakref.WeakSet()


def _abandon() -> None:
    # A forked child has no writer thread, and locks may be owned by threads that it does not have either.
    for store in _opened:
        store._lock = store._contents.lock = threading.RLock()
        store._writer, store._closed = None, True


os.register_at_fork(after_in_child=_abandon)


def _closer(reference: weakref.ref[BlockStore]) -> Callable[[], None]:
    """Return a function that closes the store if it still exists, and does not keep it alive."""

    def close() -> None:
        store = reference()
        if store is not None:
            store.close()

    return close
