"""The log of blocks that left a store, so that a miss can be explained; bounded, and kept over restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

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
_HOW: tuple[Literal["evicted", "dropped", "refused"], ...] = ("evicted", "dropped", "refused")
#: Different reasons that are remembered (a store has a dozen), and events until their numbers begin again.
_WHYS, _EVENTS = 256, (1 << 32) - 1
_ROW = np.dtype(
    [("key", "<u8"), ("at", "<f8"), ("by", "<u8"), ("event", "<u4"), ("why", "<u2"), ("how", "u1"), ("has_by", "u1")]
)


class _Event(msgspec.Struct, array_like=True, frozen=True):
    at: float
    how: Literal["evicted", "dropped", "refused"]
    why: str
    by: bytes
    keys: bytes


class RemovalLog:
    """The last ``most`` blocks that were removed, 180 bytes each. Any thread may call.

    ``file``: where it is kept over restarts (None: nowhere); call `open` then.
    """

    def __init__(
        self, file: Path | None = None, *, clock: Callable[[], float] = time.time, most: int = 1 << 16
    ) -> None:
        self._clock, self._most = clock, most
        self._lock = threading.Lock()
        #: The rows in turns; an event of 0: free, or removed again since.
        self._rows = np.zeros(most, _ROW)
        self._row: dict[int, int] = {}
        self._added = self._events = 0
        #: Rows after which the dict is made anew: one whose keys come and go takes twice the memory in the end.
        self._again = max(most // 8, 1)
        self._whys: dict[str, int] = {}
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
        """See `Store.removal`. About two microseconds."""
        if key == ROOT:
            return self._all
        with self._lock:
            row = self._row.get(int.from_bytes(key[:SHORT_KEY], "little"))
            return None if row is None else self._removal(row)

    def newest(self, most: int) -> list[tuple[int, Removal, int]]:
        """Return the last removals, newest first: a number, how the blocks left, and how many are known."""
        found: list[tuple[int, Removal, int]] = []
        with self._lock:
            for added in range(self._added - 1, max(self._added - self._most, 0) - 1, -1):
                row = added % self._most
                number = int(self._rows["event"][row])
                if not number:
                    continue
                if found and found[-1][0] == number:
                    found[-1] = (number, found[-1][1], found[-1][2] + 1)
                elif len(found) == most:
                    break
                else:
                    found.append((number, self._removal(row), 1))
        return found

    def _removal(self, row: int) -> Removal:
        _, at, by, _, why, how, has_by = self._rows[row].item()
        return Removal(at, _HOW[how], list(self._whys)[why], by.to_bytes(SHORT_KEY, "little") if has_by else b"")

    def _insert(self, event: _Event) -> None:
        if not event.keys:
            self._all = Removal(event.at, event.how, event.why, event.by)
            return
        why = event.why if event.why in self._whys or len(self._whys) < _WHYS else ""
        known = self._whys.setdefault(why, len(self._whys))
        self._events = self._events % _EVENTS + 1
        by, how = int.from_bytes(event.by, "little"), _HOW.index(event.how)
        for key in np.frombuffer(event.keys, "<u8").tolist():
            before = self._row.pop(key, None)
            if before is not None:
                self._rows["event"][before] = 0
            row, self._added = self._added % self._most, self._added + 1
            if self._rows["event"][row]:
                del self._row[int(self._rows["key"][row])]
            self._rows[row] = key, event.at, by, self._events, known, how, bool(event.by)
            self._row[key] = row
            if self._added > self._most and self._added % self._again == 0:
                self._row = dict(self._row)

    def __len__(self) -> int:
        return len(self._row)

    def check(self) -> None:
        """Raise AssertionError where a row and its key do not agree."""
        with self._lock:
            rows = np.flatnonzero(self._rows["event"])
            assert {int(self._rows["key"][row]): int(row) for row in rows} == self._row, "keys and rows disagree"
            assert len(rows) == len(self._row), "a key with two rows"
            assert self._rows["why"].max(initial=0) < max(len(self._whys), 1), "a reason that is not known"

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
