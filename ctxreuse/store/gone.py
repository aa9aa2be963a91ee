"""What left a store, when and by which rule, so that a miss can say why; bounded, and kept over restarts."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ctxreuse.errors import FormatError
from ctxreuse.keys import ROOT
from ctxreuse.store.journal import Journal, read_journal

if TYPE_CHECKING:
    from ctxreuse.store.index import Plan
    from ctxreuse.store.put import Put
    from ctxreuse.tree import ContextTree

__all__ = ["FILE", "SHORT", "Gone", "GoneBook", "read_gone"]

#: In the store's folder.
FILE = "gone.journal"
#: Bytes of a key that are kept: 64 bits tell the keys of one store apart.
SHORT = 8

_LIMIT = 4 << 20


class Gone(msgspec.Struct, frozen=True):
    """How a block left, or why it never came: ``evicted`` (``why``: the policy), ``dropped`` (the reason given to
    ``drop``, or ``forgotten``, ``capacity``, ``rebuilt``) or ``refused`` (see ``StoreStats``). ``at``: seconds since
    1970. ``by``: the beginning of a key for which room was made, if any."""

    at: float
    how: Literal["evicted", "dropped", "refused"]
    why: str
    by: bytes = b""


class _Event(msgspec.Struct, array_like=True, frozen=True):
    at: float
    how: Literal["evicted", "dropped", "refused"]
    why: str
    by: bytes
    keys: bytes


class GoneBook:
    """The last ``most`` keys that left, about 120 bytes each. Any thread may call.

    ``file``: where it is kept over restarts (None: nowhere); `open` must be called then.
    """

    def __init__(
        self, file: Path | None = None, *, clock: Callable[[], float] = time.time, most: int = 1 << 16
    ) -> None:
        self._clock, self._most = clock, most
        self._lock = threading.Lock()
        self._at: dict[int, int] = {}
        self._events: dict[int, Gone] = {}
        self._uses: Counter[int] = Counter()
        self._next = 0
        self._emptied: Gone | None = None
        self._journal = Journal(file, _LIMIT) if file is not None else None

    def open(self) -> None:
        """Read what is kept and go on writing it."""
        if self._journal is not None:
            path = self._journal.path
            self._journal.open(lambda raw: self._hold(_event(raw, path)))

    def left(
        self, keys: Sequence[bytes], how: Literal["evicted", "dropped", "refused"], why: str, by: bytes = b""
    ) -> None:
        """These left just now, or were refused. No keys: everything did."""
        event = _Event(self._clock(), how, why[:64], by[:SHORT], b"".join(key[:SHORT] for key in keys))
        with self._lock:
            self._hold(event)
            if self._journal is not None:
                self._journal.append(msgspec.msgpack.encode(event))

    def committed(self, puts: Sequence[Put], plan: Plan, policy: object, held: ContextTree) -> None:
        """A transaction of a store was committed: what it evicted, and which of ``puts`` found no place in it.
        ``policy``: who chose the victims."""
        if plan.evicted:
            self.left(
                [gone.key for gone in plan.evicted], "evicted", _rule(policy), plan.puts[0].key if plan.puts else b""
            )
        lacking = [put for put in puts if put.kind == "block" and put.key not in held]
        reasons: dict[str, list[bytes]] = {}
        for put in lacking:
            found = "no_room" if put.parent == ROOT or put.parent in held else "orphan"
            reasons.setdefault("declined" if put.key in plan.declined else found, []).append(put.key)
        for why, keys in reasons.items():
            self.left(keys, "refused", why)

    def gone(self, key: bytes) -> Gone | None:
        """How the block of ``key`` left last, as far as that is known; it may be held again. ``ROOT``: how everything
        did, if it ever was lost at once. About a microsecond."""
        if key == ROOT:
            return self._emptied
        event = self._at.get(int.from_bytes(key[:SHORT], "little"))
        return None if event is None else self._events.get(event)

    def _hold(self, event: _Event) -> None:
        gone = Gone(event.at, event.how, event.why, event.by)
        if not event.keys:
            self._emptied = gone
            return
        number, self._next = self._next, self._next + 1
        for i in range(0, len(event.keys), SHORT):
            key = int.from_bytes(event.keys[i : i + SHORT], "little")
            self._lose(key)
            self._at[key] = number
            self._uses[number] += 1
        self._events[number] = gone
        while len(self._at) > self._most:
            self._lose(next(iter(self._at)))

    def _lose(self, key: int) -> None:
        number = self._at.pop(key, None)
        if number is not None:
            self._uses[number] -= 1
            if not self._uses[number]:
                del self._uses[number]
                self._events.pop(number, None)

    def __len__(self) -> int:
        return len(self._at)

    def check(self) -> None:
        """Raises AssertionError where bounds or order are wrong."""
        with self._lock:
            numbers = list(self._at.values())
            assert len(self._at) <= self._most, "more keys than there may be"
            assert numbers == sorted(numbers), "the order of leaving is lost"
            assert Counter(numbers) == self._uses, "keys of events are counted wrongly"
            assert set(numbers) == set(self._events), "a key without its event, or an event without a key"

    def close(self) -> None:
        """Stop writing. A second call does nothing."""
        with self._lock:
            if self._journal is not None:
                self._journal.close()


def _rule(policy: object) -> str:
    """The name of a policy; of one that follows others, with whom it follows now."""
    name, leader = str(getattr(policy, "name", "")), getattr(getattr(policy, "leader", None), "name", "")
    return f"{name} ({leader} led)" if leader else name


def _event(raw: bytes, path: Path) -> _Event:
    try:
        event = msgspec.msgpack.decode(raw, type=_Event)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _strange(path, str(error)) from None
    if len(event.keys) % SHORT or len(event.by) not in (0, SHORT) or not event.at == event.at:
        raise _strange(path, "keys of another size")
    return event


def _strange(path: Path, error: str) -> FormatError:
    fix = "Delete the file: nothing but explanations of past misses is lost"
    return FormatError(f"the record of what left the store is wrong: {error}", where=str(path), fix=fix)


def read_gone(folder: Path) -> GoneBook:
    """What is kept in a store's folder, for reading beside its owner. Raises FormatError."""
    book = GoneBook()
    for raw in read_journal(folder / FILE, _LIMIT):
        book._hold(_event(raw, folder / FILE))
    return book
