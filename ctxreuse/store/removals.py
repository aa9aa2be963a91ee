"""The log of blocks that left a store, so that a miss can be explained; bounded, and kept over restarts."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import ROOT
from ctxreuse.store.journal import Journal, read_journal
from ctxreuse.store.types import Removal

__all__ = ["FILE", "SHORT_KEY", "RemovalLog", "read_removals"]

#: In the store's folder.
FILE = "gone.journal"
#: Bytes of a key that are kept: 64 bits tell the keys of one store apart.
SHORT_KEY = 8

_LIMIT = 4 << 20


class _Event(msgspec.Struct, array_like=True, frozen=True):
    at: float
    how: Literal["evicted", "dropped", "refused"]
    why: str
    by: bytes
    keys: bytes


class RemovalLog:
    """The last ``most`` removed keys, 120 bytes each and 210 for each removal. Any thread may call.

    ``file``: where it is kept over restarts (None: nowhere); call `open` then.
    """

    def __init__(
        self, file: Path | None = None, *, clock: Callable[[], float] = time.time, most: int = 1 << 16
    ) -> None:
        self._clock, self._most = clock, most
        self._lock = threading.Lock()
        self._number: dict[int, int] = {}
        self._events: dict[int, Removal] = {}
        self._uses: Counter[int] = Counter()
        self._next = 0
        self._all: Removal | None = None
        self._journal = Journal(file, _LIMIT) if file is not None else None

    def open(self) -> None:
        """Read the file and go on writing it."""
        if self._journal is not None:
            path = self._journal.path
            self._journal.open(lambda raw: self._insert(_event(raw, path)))

    def add(
        self, keys: Sequence[bytes], how: Literal["evicted", "dropped", "refused"], why: str, by: bytes = b""
    ) -> None:
        """Note that these left just now, or were refused; see `Removal`. No keys: all blocks did."""
        event = _Event(self._clock(), how, why[:64], by[:SHORT_KEY], b"".join(key[:SHORT_KEY] for key in keys))
        with self._lock:
            self._insert(event)
            if self._journal is not None:
                self._journal.append(msgspec.msgpack.encode(event))

    def removal(self, key: bytes) -> Removal | None:
        """See `Store.removal`. About a microsecond."""
        if key == ROOT:
            return self._all
        number = self._number.get(int.from_bytes(key[:SHORT_KEY], "little"))
        return None if number is None else self._events.get(number)

    def newest(self, most: int) -> list[tuple[int, Removal, int]]:
        """Return the last removals, newest first: a number, how the blocks left, and how many are known."""
        with self._lock:
            numbers = islice(reversed(self._events), most)
            return [(number, self._events[number], self._uses[number]) for number in numbers]

    def _insert(self, event: _Event) -> None:
        removal = Removal(event.at, event.how, event.why, event.by)
        if not event.keys:
            self._all = removal
            return
        number, self._next = self._next, self._next + 1
        for i in range(0, len(event.keys), SHORT_KEY):
            key = int.from_bytes(event.keys[i : i + SHORT_KEY], "little")
            self._discard(key)
            self._number[key] = number
            self._uses[number] += 1
        self._events[number] = removal
        while len(self._number) > self._most:
            self._discard(next(iter(self._number)))

    def _discard(self, key: int) -> None:
        number = self._number.pop(key, None)
        if number is not None:
            self._uses[number] -= 1
            if not self._uses[number]:
                del self._uses[number]
                self._events.pop(number, None)

    def __len__(self) -> int:
        return len(self._number)

    def check(self) -> None:
        """Raise AssertionError where bounds or order are wrong."""
        with self._lock:
            numbers = list(self._number.values())
            assert len(numbers) <= self._most, "more keys than there may be"
            assert numbers == sorted(numbers), "the order of removal is lost"
            assert Counter(numbers) == self._uses, "keys of events are counted wrongly"
            assert set(numbers) == set(self._events), "a key without its event, or an event without a key"

    def close(self) -> None:
        """Stop writing. A second call does nothing."""
        with self._lock:
            if self._journal is not None:
                self._journal.close()


def _event(raw: bytes, path: Path) -> _Event:
    try:
        event = msgspec.msgpack.decode(raw, type=_Event)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(path, str(error)) from None
    if len(event.keys) % SHORT_KEY or len(event.by) not in (0, SHORT_KEY) or not event.at == event.at:
        raise _malformed(path, "keys of another size")
    return event


def _malformed(path: Path, error: str) -> FormatError:
    fix = "Delete the file: nothing but explanations of past misses is lost"
    return FormatError(f"the log of removed blocks is malformed: {error}", where=str(path), fix=fix)


def read_removals(folder: Path) -> RemovalLog:
    """Read the log in a store's folder, also beside its owner. Raises FormatError."""
    log = RemovalLog()
    for raw in read_journal(folder / FILE, _LIMIT):
        log._insert(_event(raw, folder / FILE))
    return log
