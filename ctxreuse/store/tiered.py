"""Host memory in front of the disk: what was just computed can be read at once, and the disk may fail."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ctxreuse.block import BlockView
from ctxreuse.errors import StoreError
from ctxreuse.keys import ROOT, Tokens
from ctxreuse.levels import EXACT, fits, rank
from ctxreuse.store.base import Buffer, Coder, Entry, Kind, Reader, StoreStats
from ctxreuse.store.blocks import BlockStore
from ctxreuse.store.chunks import ChunkIndex
from ctxreuse.store.gone import Gone, GoneBook
from ctxreuse.store.host import Held, HostTier, Name
from ctxreuse.store.listing import Holding, Listeners, chunks_for
from ctxreuse.store.put import Put
from ctxreuse.store.reader import prove, prove_key
from ctxreuse.store.tally import Tally, together
from ctxreuse.tree import Match

__all__ = ["TieredStore"]

log = logging.getLogger(__name__)


class TieredReader:
    """A read over a snapshot of the host tier and one transaction on disk; see ``Reader``."""

    def __init__(self, store: TieredStore, host: dict[Name, Held], disk: Reader | None, lossy: str | None) -> None:
        self._store, self._host, self._disk, self._lossy = store, host, disk, lossy
        self.used: list[bytes] = []
        self.served: dict[str, int] = {}
        self.missed = ""

    def block(self, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        return self._get("block", key, tokens, space)

    def state(self, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        return self._get("state", key, tokens, space)

    def peek(self, key: bytes, kind: Kind = "block") -> BlockView | None:
        held = self._host.get((kind, key))
        usable = held is not None and fits(held.level, self._lossy)
        view = prove_key(held.data, key, kind)[0] if held is not None and usable else None
        return view if view is not None or self._disk is None else self._disk.peek(key, kind)

    def _get(self, kind: Kind, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        held = self._host.get((kind, key))
        view, reason, source = None, "absent", "host"
        if held is not None and not fits(held.level, self._lossy):
            reason = "level"
        elif held is not None:
            view, reason = prove(held.data, key, tokens, space, kind)
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
    """A ``Store`` of ``host_bytes`` of memory and, unless ``disk`` is None, a ``BlockStore`` that it owns and closes.

    Puts are readable at once. With a disk they leave memory when they are committed: the page cache serves as well.
    What the disk refuses stays in memory while there is room: a failing disk makes the store smaller, not broken.
    """

    def __init__(self, host_bytes: int, disk: BlockStore | None = None) -> None:
        self._disk = disk
        self._listeners = Listeners()
        self._gone = disk.gone_book if disk is not None else GoneBook()
        self.chunks = disk.chunks if disk is not None else ChunkIndex.open(most=chunks_for(host_bytes))
        self._host = HostTier(host_bytes, self._listeners.tell, self._evicted)
        self._lock = threading.RLock()
        self._tally = Tally()
        self._closed = False
        if disk is not None:
            disk.subscribe(self._committed)
            disk.watch(self._listeners.tell)

    @property
    def disk(self) -> BlockStore | None:
        """The disk tier."""
        return self._disk

    def _committed(self, names: Sequence[Name]) -> None:
        with self._lock:
            for name in names:
                if not self._host.pins[name[1]]:
                    self._host.remove(name)

    def _held(self, keys: Sequence[bytes]) -> list[Holding | None]:
        """What both tiers hold, each value at the better of two levels."""
        # The disk after the host would miss what is committed and released in between, so the host goes first.
        with self._lock:
            blocks = [self._host.get(("block", key)) for key in keys]
            states = [self._host.get(("state", key)) for key in keys]
            splits = [self._host.split(key) for key in keys]
        below: Sequence[Holding | None] = [None] * len(keys)
        if self._disk is not None and not self._closed:
            below = self._disk.held(keys)
        found: list[Holding | None] = []
        for block, state, split, under in zip(blocks, states, splits, below):
            if block is None and under is None:
                found.append(None)
                continue
            one, two, parted = (under.block, under.state, under.split) if under is not None else ("", "", False)
            tokens = block.tokens if block is not None else under.tokens if under is not None else 0
            found.append(Holding(tokens, _better(block, one), _better(state, two), split or parted))
        return found

    def match(self, keys: Sequence[bytes], lossy: str | None = None) -> Match:
        blocks = tokens = state_blocks = state_tokens = 0
        split = False
        for held in self._held(keys):
            if held is None or not fits(held.block, lossy):
                break
            blocks, tokens, split = blocks + 1, tokens + held.tokens, held.split
            if held.state and fits(held.state, lossy):
                state_blocks, state_tokens = blocks, tokens
        return Match(blocks, tokens, state_blocks, state_tokens, split)

    def walk(self) -> Iterator[Entry]:
        # The host first, as in _held; what is in both is told once.
        with self._lock:
            names = self._host.items()
            hosted = {key: self._entry(key) for kind, key in names if kind == "block"}
        below = list(self._disk.walk()) if self._disk is not None and not self._closed else []
        states = {key: held for (kind, key), held in names.items() if kind == "state"}
        found: dict[bytes, Entry] = {}
        under = {entry.key: entry for entry in below}
        for key in under | hosted:
            entry = _merged(hosted.get(key), under.get(key), states.get(key))
            if entry is not None:
                found[key] = entry
        return iter(sorted(found.values(), key=lambda entry: entry.end))

    def recent(self) -> list[bytes]:
        with self._lock:
            hosted = self._host.recent()
        below = self._disk.recent() if self._disk is not None and not self._closed else []
        return list(dict.fromkeys([*hosted, *below]))

    def entries(self, keys: Sequence[bytes]) -> list[Entry | None]:
        with self._lock:
            hosted = [(self._entry(key), self._host.get(("state", key))) for key in keys]
        below = self._disk.entries(keys) if self._disk is not None and not self._closed else [None] * len(keys)
        return [_merged(here, under, state) for (here, state), under in zip(hosted, below)]

    def _entry(self, key: bytes) -> Entry | None:
        held = self._host.get(("block", key))
        if held is None:
            return None
        return Entry(key, held.parent, held.tokens, held.end, held.nbytes, False, held.level)

    def _evicted(self, keys: Sequence[bytes], by: bytes) -> None:
        if keys and self._disk is None:  # what a disk did not take had its reason there
            self._gone.left(keys, "evicted", "host memory", by)

    def gone(self, key: bytes) -> Gone | None:
        return self._gone.gone(key)

    def watch(self, listener: Callable[[Sequence[bytes]], None]) -> Callable[[], None]:
        return self._listeners.add(listener)

    @contextlib.contextmanager
    def read(self, lossy: str | None = None) -> Iterator[TieredReader]:
        with self._lock:
            host = self._host.items()
        with contextlib.ExitStack() as stack:
            disk: Reader | None = None
            if self._disk is not None:
                try:
                    disk = stack.enter_context(self._disk.read(lossy))
                except StoreError as error:
                    log.warning("reading goes on without the disk: %s", error)
            reader = TieredReader(self, host, disk, lossy)
            try:
                yield reader
            finally:
                with self._lock:
                    self._tally.hits += len(reader.used)
                    self._host.touch(reader.used)

    def count_miss(self, reason: str) -> None:
        """Count a miss that a reader met."""
        with self._lock:
            self._tally.misses[reason] += 1

    def put(
        self, key: bytes, data: Buffer, *, kind: Kind = "block", replace: bool = False, lossy: str | None = None
    ) -> bool:
        item = Put.parse(key, data, kind, replace, lossy)
        if item is None:
            return self._refuse("malformed", key)
        if self._closed:
            return self._refuse("closed", key)
        name: Name = (kind, key)
        anchor = item.parent if kind == "block" else key
        hosted = fresh = False
        if (kind == "block" and anchor == ROOT) or self._held([anchor])[0] is not None:
            with self._lock:
                before = self._host.get(name)
                fresh = before is None or item.beats(before.level)
                hosted = self._host.put(item) if fresh else True
                self._host.touch([key])
        # The host went first: the disk's commit takes it out again, and must find it there. What hangs on a put that
        # still waits, and that the host had no room for, only the disk can place.
        stored = self._disk is not None and self._disk.put(key, data, kind=kind, replace=replace, lossy=lossy)
        if not hosted and not stored:
            return self._refuse("no_room" if fresh else "orphan", key)
        if stored and fresh and hosted:
            self._release_if_held(name)
        with self._lock:
            self._tally.puts += 1
        return True

    def _release_if_held(self, name: Name) -> None:
        # A duplicate of what is on disk already is never committed again, so nobody would release it.
        assert self._disk is not None
        if self._disk.queued(*name):
            return
        entry = self._disk.held([name[1]])[0]
        if entry is not None and (entry.block if name[0] == "block" else entry.state):
            self._committed([name])

    def _refuse(self, reason: str, key: bytes) -> bool:
        with self._lock:
            self._tally.refused[reason] += 1
        if self._disk is None:  # else it was written down there
            self._gone.left([key], "refused", reason)
        return False

    def pin(self, keys: Sequence[bytes]) -> int:
        return self._count(keys, 1)

    def unpin(self, keys: Sequence[bytes]) -> int:
        return self._count(keys, -1)

    def _count(self, keys: Sequence[bytes], step: int) -> int:
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
            gone = self._host.subtree(key)
            held = [key for key in gone if ("block", key) in self._host or ("state", key) in self._host]
            # What the disk holds too is counted there.
            under = self._disk.held(held) if self._disk is not None else [None] * len(held)
            for below, twin in zip(held, under):
                self._host.remove(("state", below))
                self._host.remove(("block", below))
                self._host.pins.pop(below, None)
                if twin is None:
                    self._tally.dropped[reason if below == key else "below"] += 1
            if held:
                self._gone.left(held, "dropped", reason)
        if self._disk is not None:
            self._disk.drop(key, reason)

    def forget(self, keys: Sequence[bytes]) -> int:
        below = self._disk.forget(keys) if self._disk is not None else 0
        gone = 0
        with self._lock:
            for key in reversed(keys):
                if not self._host.lone(key):
                    if ("block", key) in self._host:
                        break
                    if self._disk is not None and self._disk.held([key])[0] is None:
                        self._host.remove(("state", key))  # its block went from the disk
                    continue
                self._host.remove(("state", key))
                self._host.remove(("block", key))
                self._tally.dropped["forgotten"] += 1
                self._gone.left([key], "dropped", "forgotten")
                gone += 1
        return max(gone, below)

    def asked(self, keys: Sequence[bytes], tokens: int) -> None:
        if self._disk is not None:
            self._disk.asked(keys, tokens)

    def mark(self, keys: Sequence[bytes], label: int) -> None:
        if self._disk is not None:
            self._disk.mark(keys, label)

    def price(self, per_token: float, per_pair: float) -> None:
        if self._disk is not None:
            self._disk.price(per_token, per_pair)

    def adopt(self, coder: Coder) -> None:
        if self._disk is not None:
            self._disk.adopt(coder)

    def touch(self, keys: Sequence[bytes], *, needed: bool = False) -> None:
        with self._lock:
            self._host.touch(keys)
        if self._disk is not None:
            self._disk.touch(keys, needed=needed)

    def stats(self) -> StoreStats:
        """Figures of both tiers together, what both hold counted once; ``refused`` counts what neither took."""
        below = self._disk.stats() if self._disk is not None else None
        with self._lock:
            names = list(self._host.items())
            if self._disk is not None:
                under = self._disk.held([key for _, key in names])
                twins = [
                    u is not None and bool(u.block if kind == "block" else u.state)
                    for (kind, _), u in zip(names, under)
                ]
                names = [name for name, twin in zip(names, twins) if not twin]
            blocks, states, tokens = self._host.counts(names)
            held = blocks, states, self._host.nbytes
            self._tally.evicted = self._host.evicted
            values = (self._host.get(name) for name in names if name[0] == "block")
            levels = Counter(value.level for value in values if value is not None)
            mine = self._tally.stats(held=held, tokens=tokens, capacity=self._host.capacity, levels=levels)
        return mine if below is None else together(mine, below)

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


def _better(held: Held | None, level: str) -> str:
    """The better level of a value in memory and of that on disk ("": there is none)."""
    if held is None or not level:
        return level if held is None else held.level
    return min(held.level, level, key=rank)


def _merged(here: Entry | None, under: Entry | None, state: Held | None) -> Entry | None:
    """One entry of a block in memory, of one on disk, and of a state in memory."""
    if here is not None and under is not None and rank(under.level) < rank(here.level):
        here = None
    entry = here if here is not None else under
    if entry is None:
        return None
    below = under.state_level if under is not None and under.has_state else ""
    level = _better(state, below)
    return entry._replace(has_state=bool(level), state_level=level or EXACT)
