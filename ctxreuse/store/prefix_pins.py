"""Prefixes of prompts that clients want kept for a time: their blocks are pinned until it has passed since their last
use, also across restarts."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from base64 import b64decode, b64encode
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ctxreuse.errors import StoreError
from ctxreuse.identity.keys import ROOT
from ctxreuse.private import read_list, write_private
from ctxreuse.store.base import Store

__all__ = ["PrefixPins"]

log = logging.getLogger(__name__)

#: Part of the store's capacity that pins may take: one in so many bytes.
_SHARE = 4
_FLUSH_SECONDS = 30.0
#: Seconds between two looks at the clock at most, and between two writes of the file after uses alone.
_LOOK = 60.0


class _Pin(msgspec.Struct):
    keys: list[bytes]
    nbytes: int
    seconds: float
    expires: float
    caller: str


class _Wanted(NamedTuple):
    keys: Sequence[bytes]
    seconds: float
    caller: str


class _Row(msgspec.Struct, frozen=True):
    """A pin in the file: the key of its last block, whose parents the store knows."""

    key: str
    seconds: float
    expires: float
    caller: str = ""


class PrefixPins:
    """All pinned prefixes of one store. Thread-safe; close it.

    Together they take at most a quarter of the store's capacity: beyond that, the pin that would end first of the
    caller that has the most ends now, and of a prefix that is too long by itself the beginning is pinned.

    Args:
        store: its blocks are pinned, and unpinned before they are closed.
        file: where pins outlive the process.
        clock: seconds since 1970.
    """

    def __init__(self, store: Store, file: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._file, self._clock = store, file, clock
        self._limit = store.stats().capacity // _SHARE
        self._changed = threading.Condition()
        #: By the last key of each.
        self._pins: dict[bytes, _Pin] = {}
        self._sizes: dict[bytes, int] = {}
        self._uses: Counter[bytes] = Counter()
        self._wanted: list[_Wanted] = []
        self._dirty = self._closed = False
        self._thread = threading.Thread(target=self._run, name="ctxreuse-pins", daemon=True)
        self._restore()

    def start(self) -> None:
        """Begin to pin and unpin in a thread."""
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of all pinned blocks."""
        with self._changed:
            return sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._pins)

    def keep(self, keys: Sequence[bytes], seconds: float, caller: str = "") -> None:
        """Pin the blocks of a prefix, which were computed just now, until ``seconds`` after their last use; returns at
        once. ``caller``: whose share it takes."""
        if keys:
            with self._changed:
                self._wanted.append(_Wanted(keys, seconds, _digest(caller)))
                self._changed.notify_all()

    def release(self, keys: Sequence[bytes], caller: str = "") -> None:
        """End what `keep` was asked by this caller of prefixes of a prompt; returns at once."""
        digest, ends = _digest(caller), frozenset(keys)
        with self._changed:
            self._wanted = [one for one in self._wanted if one.caller != digest or one.keys[-1] not in ends]
            for key in ends & self._pins.keys():
                if self._pins[key].caller == digest:
                    self._pins[key].expires = 0.0
            self._changed.notify_all()

    def use(self, keys: Sequence[bytes]) -> None:
        """Prolong the pins of all prefixes of a prompt."""
        with self._changed:
            for pin in [self._pins[key] for key in keys if key in self._pins] if self._pins else ():
                pin.expires = self._clock() + pin.seconds
                self._dirty = True

    def work(self) -> None:
        """Pin what is wanted, unpin what has ended, and save: what the thread does."""
        with self._changed:
            wanted, self._wanted = self._wanted, []
        if wanted:
            try:
                self._store.flush(_FLUSH_SECONDS)
            except StoreError as error:  # what the disk does not take would be pinned in memory, which has less room
                log.warning("prefixes are not pinned: %s", error)
                wanted = []
        with self._changed:
            for one in wanted:
                self._pin(one, self._clock() + one.seconds)
            now, stored = self._clock(), self._store.entries(list(self._pins))  # what was forgotten is not
            for key in [key for key, one in zip(self._pins, stored) if one is None or self._pins[key].expires <= now]:
                self._unpin(key)
            if self._dirty:
                self._save()

    def _pin(self, wanted: _Wanted, expires: float) -> None:
        sizes: list[int] = []
        for entry in self._store.entries(wanted.keys):
            if entry is None or sum(sizes) + entry.nbytes > self._limit:
                break
            sizes.append(entry.nbytes)
        keys = list(wanted.keys[: len(sizes)])
        if not keys:
            return
        pin = _Pin(keys, sum(sizes), wanted.seconds, expires, wanted.caller)
        before = self._pins.get(keys[-1])
        if before is not None:
            pin.seconds, pin.expires = max(pin.seconds, before.seconds), max(pin.expires, before.expires)
        self._store.pin(keys)
        self._uses.update(keys)
        self._sizes |= zip(keys, sizes)
        # What a longer prefix holds for as long needs no pin of its own: conversations grow.
        for key in keys:
            old = self._pins.get(key)
            if old is not None and old.expires <= pin.expires and (key == keys[-1] or old.caller == pin.caller):
                self._unpin(key)
        self._pins[keys[-1]] = pin
        self._dirty = True
        while self.nbytes > self._limit and len(self._pins) > 1:
            self._unpin(self._victim(keys[-1]))

    def _victim(self, newest: bytes) -> bytes:
        """The last key of the pin that makes room: of the caller with the most, the one that would end first."""
        bytes_of: dict[str, int] = defaultdict(int)
        for pin in self._pins.values():
            bytes_of[pin.caller] += pin.nbytes
        others = [key for key in self._pins if key != newest]
        return max(others, key=lambda key: (bytes_of[self._pins[key].caller], -self._pins[key].expires))

    def _unpin(self, key: bytes) -> None:
        pin = self._pins.pop(key)
        self._store.unpin(pin.keys)
        self._uses.subtract(pin.keys)
        for one in pin.keys:
            if not self._uses[one]:
                del self._uses[one], self._sizes[one]
        self._dirty = True

    def _save(self) -> None:
        rows = [_Row(b64encode(key).decode(), p.seconds, p.expires, p.caller) for key, p in self._pins.items()]
        try:
            write_private(self._file, msgspec.json.encode(rows))
            self._dirty = False
        except OSError as error:
            log.warning("pins of prefixes could not be saved: %s", error)

    def _restore(self) -> None:
        for row in read_list(self._file, _Row, "pins of prefixes"):
            if row.expires > self._clock():
                keys: list[bytes] = []
                with contextlib.suppress(ValueError):
                    keys = self._path(b64decode(row.key))
                self._pin(_Wanted(keys, row.seconds, row.caller), row.expires)

    def _path(self, key: bytes) -> list[bytes]:
        """The stored keys from the first block to this one; empty if it is not stored any more."""
        keys: list[bytes] = []
        while key != ROOT and (entry := self._store.entries([key])[0]) is not None:
            keys.append(key)
            key = entry.parent
        return keys[::-1] if key == ROOT else []

    def _run(self) -> None:
        while not self._closed:
            self.work()
            with self._changed:
                if not self._wanted and not self._closed:
                    ends = min((pin.expires for pin in self._pins.values()), default=float("inf"))
                    self._changed.wait(min(max(ends - self._clock(), 0.1), _LOOK))

    def close(self) -> None:
        """End the thread; the file keeps the pins."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.work()

    def check(self) -> None:
        """Raise AssertionError if what is counted is not what the pins hold."""
        with self._changed:
            pinned = Counter(key for pin in self._pins.values() for key in pin.keys)
            assert pinned == +self._uses
            assert set(pinned) == set(self._sizes)
            assert self.nbytes <= max(self._limit, 0) or len(self._pins) == 1


def _digest(caller: str) -> str:
    """What stands for a caller in the file: not its key."""
    return hashlib.sha256(caller.encode()).hexdigest()[:16] if caller else ""
