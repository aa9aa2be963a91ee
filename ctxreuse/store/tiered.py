"""Host memory in front of the disk: a value that was just computed can be read at once, and the disk may fail."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ctxreuse.block.format import BlockView, Buffer, Kind
from ctxreuse.block.levels import EXACT, allowed_by, quality_key
from ctxreuse.errors import StoreError
from ctxreuse.identity.keys import ROOT, Tokens
from ctxreuse.store.base import BlockCodec, Reader
from ctxreuse.store.blocks.counters import StoreCounters, merge_stats
from ctxreuse.store.blocks.pending import Put
from ctxreuse.store.blocks.reader import prove, prove_key
from ctxreuse.store.blocks.store import BlockStore
from ctxreuse.store.chunks.index import ChunkIndex, chunk_limit
from ctxreuse.store.host import HostTier, Name
from ctxreuse.store.listeners import KeyListeners
from ctxreuse.store.removals import RemovalLog
from ctxreuse.store.runs import NO_RUN, RUN, ContextRuns, joined_runs
from ctxreuse.store.types import Entry, Holding, Removal, StoreStats
from ctxreuse.tree import Match

__all__ = ["TieredStore"]

log = logging.getLogger(__name__)

#: Reasons for which the disk may take a value later.
_FOR_NOW = ("backoff", "queue_full")


class TieredReader:
    """A read over a snapshot of the host tier and one transaction on disk; see `Reader`."""

    def __init__(self, store: TieredStore, host: dict[Name, Put], disk: Reader | None, max_kl: float | None) -> None:
        self._store, self._host, self._disk, self._max_kl = store, host, disk, max_kl
        self.used: list[bytes] = []
        self.served: dict[str, int] = {}
        self.missed = ""

    def block(self, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        return self._get("block", key, tokens, space)

    def state(self, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        return self._get("state", key, tokens, space)

    def peek(self, key: bytes, kind: Kind = "block") -> BlockView | None:
        item = self._host.get((kind, key))
        usable = item is not None and allowed_by(item.level, self._max_kl)
        view = prove_key(item.data, key, kind)[0] if item is not None and usable else None
        return view if view is not None or self._disk is None else self._disk.peek(key, kind)

    def _get(self, kind: Kind, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        item = self._host.get((kind, key))
        view, reason, source = None, "absent", "host"
        if item is not None and not allowed_by(item.level, self._max_kl):
            reason = "level"
        elif item is not None:
            view, reason = prove(item.data, key, tokens, space, kind)
            if view is None:
                self._store.drop(key, reason)
        if view is None and self._disk is not None:
            source = "disk"
            view = self._disk.block(key, tokens, space) if kind == "block" else self._disk.state(key, tokens, space)
            found = self._disk.missed or "absent"
            reason = found if view is None and reason in ("absent", "level") and found != "absent" else reason
        if view is None:
            self.missed = self.missed or reason
            self._store.count_miss(reason)
            return None
        self.used.append(key)
        if kind == "block":
            self.served[source] = self.served.get(source, 0) + len(tokens)
        return view


class TieredStore:
    """A `Store` of ``host_bytes`` of memory and, unless ``disk`` is None, a `BlockStore` that it owns and closes.

    Puts are readable at once. With a disk they leave memory when they are committed: the page cache serves as well.
    Values that the disk refuses stay in memory while there is room: a failing disk makes the store smaller, not broken.
    """

    def __init__(self, host_bytes: int, disk: BlockStore | None = None) -> None:
        self._disk = disk
        self._listeners = KeyListeners()
        self._removals = disk.removals if disk is not None else RemovalLog()
        self.chunks = disk.chunks if disk is not None else ChunkIndex.open(most=chunk_limit(host_bytes))
        self._host = HostTier(host_bytes, self._listeners.notify, self._on_evict)
        self._lock = threading.RLock()
        self._counters = StoreCounters()
        self._closed = False
        #: Values in memory that the disk could not take at that moment.
        self._owed: set[Name] = set()
        if disk is not None:
            disk.subscribe(self._release)
            disk.watch(self._listeners.notify)
            disk.on_failure(self._owe, self._offer_again)

    @property
    def removals(self) -> RemovalLog:
        """How blocks left."""
        return self._removals

    @property
    def disk(self) -> BlockStore | None:
        """The disk tier."""
        return self._disk

    def _release(self, names: Sequence[Name]) -> None:
        """Remove committed values from memory, unless pinned."""
        with self._lock:
            self._owed.difference_update(names)
            for name in names:
                if not self._host.pins[name[1]]:
                    self._host.remove(name)

    def _owe(self, names: Sequence[Name]) -> None:
        with self._lock:
            self._owed.update(name for name in names if name in self._host)

    def _is_owed(self, key: bytes) -> bool:
        """Return True while memory has a block that the disk could not take: its children would be orphans there."""
        with self._lock:
            return ("block", key) in self._owed

    def _offer_again(self, most: int) -> bool:
        """Offer the disk up to ``most`` of the values that it could not take; returns whether any are left."""
        assert self._disk is not None
        with self._lock:
            found = [(name, self._host.get(name)) for name in self._owed]
            self._owed.difference_update(name for name, item in found if item is None)
        items = sorted((item for _, item in found if item is not None), key=lambda item: (item.end, item.kind))
        for item in items[:most]:
            if self._disk.offer(item, 0.0) in _FOR_NOW:
                break
            with self._lock:
                self._owed.discard(item.name)  # the commit tells if it fails again
            self._release_if_stored(item.name)
        return bool(items)

    def _holdings(self, keys: Sequence[bytes]) -> list[Holding | None]:
        """What both tiers store, each value at the better of two levels."""
        # Memory first: read after the disk, it would miss values committed and released in between.
        with self._lock:
            blocks = [self._host.get(("block", key)) for key in keys]
            states = [self._host.get(("state", key)) for key in keys]
            splits = [self._host.split(key) for key in keys]
        below: Sequence[Holding | None] = [None] * len(keys)
        if self._disk is not None and not self._closed:
            below = self._disk.holdings(keys)
        found: list[Holding | None] = []
        for block, state, split, under in zip(blocks, states, splits, below):
            if block is None and under is None:
                found.append(None)
                continue
            one, two, parted = (under.block, under.state, under.split) if under is not None else ("", "", False)
            tokens = block.tokens if block is not None else under.tokens if under is not None else 0
            found.append(Holding(tokens, _better(block, one), _better(state, two), split or parted))
        return found

    def match(self, keys: Sequence[bytes], max_kl: float | None = None) -> Match:
        blocks = tokens = state_blocks = state_tokens = 0
        split = False
        for found in self._holdings(keys):
            if found is None or not allowed_by(found.block, max_kl):
                break
            blocks, tokens, split = blocks + 1, tokens + found.tokens, found.split
            if found.state and allowed_by(found.state, max_kl):
                state_blocks, state_tokens = blocks, tokens
        return Match(blocks, tokens, state_blocks, state_tokens, split)

    def walk(self) -> Iterator[Entry]:
        # Memory first, as in _holdings; a block in both is listed once.
        with self._lock:
            items = self._host.items()
        hosted = {key: _entry(item) for (kind, key), item in items.items() if kind == "block"}
        states = {key: item for (kind, key), item in items.items() if kind == "state"}
        below = self._disk.walk() if self._disk is not None and not self._closed else ()
        under = {entry.key: entry for entry in below}
        found = (_merged(hosted.get(key), under.get(key), states.get(key)) for key in under | hosted)
        return iter(sorted((entry for entry in found if entry is not None), key=lambda entry: entry.end))

    def runs(self) -> ContextRuns:
        """Return what both tiers store as runs; a block in both is one on disk. See `ctxreuse.store.runs`."""
        with self._lock:
            items = [item for (kind, _), item in self._host.items().items() if kind == "block"]
            pins = list(self._host.pins)
        keys = list({key for item in items for key in (item.key, item.parent)})
        if self._disk is None or self._closed:
            below, numbers = ContextRuns(np.zeros(0, RUN), ()), [NO_RUN] * len(keys)
        else:
            below, numbers = self._disk.runs(keys)
        found = {key: number for key, number in zip(keys, numbers) if number != NO_RUN}
        return joined_runs(below, found, items, pins)

    def recent(self) -> list[bytes]:
        with self._lock:
            hosted = self._host.recent()
        below = self._disk.recent() if self._disk is not None and not self._closed else []
        return list(dict.fromkeys([*hosted, *below]))

    def entries(self, keys: Sequence[bytes]) -> list[Entry | None]:
        with self._lock:
            hosted = [(self._host.get(("block", key)), self._host.get(("state", key))) for key in keys]
        below = self._disk.entries(keys) if self._disk is not None and not self._closed else [None] * len(keys)
        return [_merged(_entry(block), under, state) for (block, state), under in zip(hosted, below)]

    def _on_evict(self, keys: Sequence[bytes], by: bytes) -> None:
        if keys and self._disk is None:  # the disk logged why it did not store them
            self._removals.add(keys, "evicted", "host memory", by)

    def removal(self, key: bytes) -> Removal | None:
        return self._removals.removal(key)

    def watch(self, listener: Callable[[Sequence[bytes]], None]) -> Callable[[], None]:
        return self._listeners.add(listener)

    @contextlib.contextmanager
    def read(self, max_kl: float | None = None) -> Iterator[TieredReader]:
        with self._lock:
            host = self._host.items()
        with contextlib.ExitStack() as stack:
            disk: Reader | None = None
            if self._disk is not None:
                try:
                    disk = stack.enter_context(self._disk.read(max_kl))
                except StoreError as error:
                    log.warning("reading goes on without the disk: %s", error)
            reader = TieredReader(self, host, disk, max_kl)
            try:
                yield reader
            finally:
                with self._lock:
                    self._counters.hits += len(reader.used)
                    self._host.touch(reader.used)

    def count_miss(self, reason: str) -> None:
        """Count a miss of a reader."""
        with self._lock:
            self._counters.misses[reason] += 1

    def givers(self) -> dict[bytes, bytes]:
        # Memory first, as in _holdings; what is there is newer.
        with self._lock:
            hosted = {item.key: item.giver for item in self._host.items().values() if item.giver}
        return (self._disk.givers() if self._disk is not None and not self._closed else {}) | hosted

    def put(
        self,
        key: bytes,
        data: Buffer,
        *,
        kind: Kind = "block",
        replace: bool = False,
        max_kl: float | None = None,
        giver: bytes = b"",
    ) -> bool:
        item = Put.parse(key, data, kind, replace, max_kl, giver)
        if item is None:
            return self._refuse("malformed", key)
        if self._closed:
            return self._refuse("closed", key)
        anchor = item.parent if kind == "block" else key
        hosted = fresh = False
        if (kind == "block" and anchor == ROOT) or self._holdings([anchor])[0] is not None:
            with self._lock:
                before = self._host.get(item.name)
                fresh = before is None or item.beats(before.level)
                hosted = self._host.put(item) if fresh else True
                self._host.touch([key])
        # Memory first: the disk's commit releases the value, and must find it there. A child of a put that is still
        # queued, and that memory had no room for, can only be placed by the disk.
        reason = "closed"
        if self._disk is not None and hosted and self._is_owed(anchor):
            reason = "backoff"
            self._disk.refuse(reason, key)
        elif self._disk is not None:
            reason = self._disk.offer(item)
        stored = not reason
        if hosted and fresh and reason in _FOR_NOW and self._disk is not None:
            self._owe([item.name])
        if not hosted and not stored:
            return self._refuse("no_room" if fresh else "orphan", key)
        if stored and fresh and hosted:
            self._release_if_stored(item.name)
        with self._lock:
            self._counters.puts += 1
        return True

    def _release_if_stored(self, name: Name) -> None:
        # A duplicate of a value on disk is never committed again, so no commit would release it.
        assert self._disk is not None
        if self._disk.queued(*name):
            return
        found = self._disk.holdings([name[1]])[0]
        if found is not None and (found.block if name[0] == "block" else found.state):
            self._release([name])

    def _refuse(self, reason: str, key: bytes) -> bool:
        with self._lock:
            self._counters.refused[reason] += 1
        if self._disk is None:  # else the disk logged it
            self._removals.add([key], "refused", reason)
        return False

    def pin(self, keys: Sequence[bytes]) -> int:
        return self._count_pins(keys, 1)

    def unpin(self, keys: Sequence[bytes]) -> int:
        return self._count_pins(keys, -1)

    def _count_pins(self, keys: Sequence[bytes], step: int) -> int:
        reached = 0
        for key in keys:
            below = 0
            if self._disk is not None:
                below = self._disk.pin([key]) if step > 0 else self._disk.unpin([key])
            with self._lock:
                pins = self._host.pins
                here = ("block", key) in self._host if step > 0 else pins[key] > 0
                if here:
                    pins[key] += step
                if not pins[key]:
                    del pins[key]
            reached += bool(below or here)
        return reached

    def flush(self, timeout: float | None = None) -> None:
        if self._disk is not None:
            self._disk.flush(timeout)

    def drop(self, key: bytes, reason: str) -> None:
        with self._lock:
            keys = [
                one for one in self._host.subtree(key) if ("block", one) in self._host or ("state", one) in self._host
            ]
            # Values that are on disk too are counted there.
            under = self._disk.holdings(keys) if self._disk is not None else [None] * len(keys)
            for one, twin in zip(keys, under):
                self._remove(one)
                self._host.pins.pop(one, None)
                if twin is None:
                    self._counters.dropped[reason if one == key else "below"] += 1
            if keys:
                self._removals.add(keys, "dropped", reason)
        if self._disk is not None:
            self._disk.drop(key, reason)

    def _remove(self, key: bytes) -> None:
        self._host.remove(("state", key))
        self._host.remove(("block", key))

    def forget(self, keys: Sequence[bytes]) -> int:
        below = self._disk.forget(keys) if self._disk is not None else 0
        removed = 0
        with self._lock:
            for key in reversed(keys):
                for partial in self._host.partials(key):
                    removed += self._forget(partial)
                if self._host.is_free_leaf(key):
                    removed += self._forget(key)
                elif ("block", key) in self._host:
                    break
                elif self._disk is not None and self._disk.holdings([key])[0] is None:
                    self._host.remove(("state", key))  # its block went from the disk
        return max(removed, below)

    def _forget(self, key: bytes) -> int:
        self._remove(key)
        self._counters.dropped["forgotten"] += 1
        self._removals.add([key], "dropped", "forgotten")
        return 1

    def touch(self, keys: Sequence[bytes], *, partial: bool = False) -> None:
        with self._lock:
            self._host.touch(keys)
        if self._disk is not None:
            self._disk.touch(keys, partial=partial)

    def on_lookup(self, keys: Sequence[bytes], tokens: int) -> None:
        if self._disk is not None:
            self._disk.on_lookup(keys, tokens)

    def on_pause(self, keys: Sequence[bytes], label: int) -> None:
        if self._disk is not None:
            self._disk.on_pause(keys, label)

    def set_recompute_cost(self, per_token: float, per_pair: float) -> None:
        if self._disk is not None:
            self._disk.set_recompute_cost(per_token, per_pair)

    def share_by(self, over: Callable[[int], Callable[[bytes], bool] | None]) -> None:
        if self._disk is not None:
            self._disk.share_by(over)

    def register_codec(self, codec: BlockCodec) -> None:
        if self._disk is not None:
            self._disk.register_codec(codec)

    def stats(self) -> StoreStats:
        """Return the figures of both tiers, values in both counted once; ``refused`` counts what neither accepted."""
        below = self._disk.stats() if self._disk is not None else None
        with self._lock:
            names = list(self._host.items())
            if self._disk is not None:
                under = self._disk.holdings([key for _, key in names])
                twins = (
                    u is not None and (u.block if kind == "block" else u.state) for (kind, _), u in zip(names, under)
                )
                names = [name for name, twin in zip(names, twins) if not twin]
            blocks, states, tokens = self._host.counts(names)
            self._counters.evicted = self._host.evicted
            values = (self._host.get(name) for name in names if name[0] == "block")
            owed = [item for item in map(self._host.get, self._owed) if item is not None]
            mine = self._counters.stats(
                sizes=(blocks, states, self._host.nbytes),
                levels=Counter(value.level for value in values if value is not None),
                tokens=tokens,
                capacity=self._host.capacity,
                queued=0,
                queued_bytes=0,
                file_bytes=0,
                unwritten=len(owed),
                unwritten_bytes=sum(len(item.data) for item in owed),
            )
        return mine if below is None else merge_stats(mine, below)

    def check(self) -> None:
        with self._lock:
            self._host.check()
        if self._disk is not None:
            self._disk.check()

    def close(self) -> None:
        self._closed = True
        self.chunks.close()
        if self._disk is not None:
            self._disk.close()

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _entry(block: Put | None) -> Entry | None:
    if block is None:
        return None
    return Entry(block.key, block.parent, block.tokens, block.end, len(block.data), False, block.level)


def _better(item: Put | None, level: str) -> str:
    """Return the better level of a value in memory and of that on disk ("": none)."""
    if item is None or not level:
        return level if item is None else item.level
    return min(item.level, level, key=quality_key)


def _merged(here: Entry | None, under: Entry | None, state: Put | None) -> Entry | None:
    """Return one entry of a block in memory, of one on disk, and of a state in memory."""
    if here is not None and under is not None and quality_key(under.level) < quality_key(here.level):
        here = None
    entry = here if here is not None else under
    if entry is None:
        return None
    below = under.state_level if under is not None and under.has_state else ""
    level = _better(state, below)
    return entry._replace(has_state=bool(level), state_level=level or EXACT)
