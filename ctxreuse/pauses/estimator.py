"""Learns when paused contexts return, by stop reason, tool, tenant and session, from pauses that may still last."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from ctxreuse.pauses.hazard import BUCKETS, Rates, bucket, exposure, prior, shrink, survival, worth

__all__ = ["Counts", "Estimator", "Pause", "pack_counts", "unpack_counts"]

_Type: TypeAlias = tuple[str, ...]

_VERSION = 1
#: Types that are kept over a restart, most returns first, and how long their names may be: 48 KiB in all.
_SAVED, _NAME = 128, 48
#: A type's counts are halved beyond this many returns, so that old ones count less.
_ENOUGH = 4096.0


class Pause(NamedTuple):
    """Names that classify a pause, each empty if unknown; ``session`` is learnt from but not saved."""

    stop: str
    tool: str = ""
    tenant: str = ""
    session: str = ""

    def types(self) -> list[_Type]:
        """Its types, coarse to fine."""
        found: list[_Type] = [(), (self.stop,)]
        if self.tool:
            found.append((self.stop, self.tool))
        if self.tenant:
            found.append((self.stop, self.tool, self.tenant))
        if self.session:
            found.append((self.stop, "", "", self.session))
        return found


class Counts(NamedTuple):
    """What is kept of one type over a restart: ``name`` from coarse to fine, ``changes``: how often it returned."""

    name: tuple[str, ...]
    changes: float
    returns: Rates
    seconds: Rates


class _Counts:
    """Returns and seconds away of one type, by bucket. ``changes`` counts returns, undiminished."""

    __slots__ = ("changes", "returns", "seconds")

    def __init__(self) -> None:
        self.returns, self.seconds = np.zeros(BUCKETS), np.zeros(BUCKETS)
        self.changes = 0


class _Made(NamedTuple):
    """Rates of a pause and when they were made, in changes of each of its types."""

    changes: tuple[int, ...]
    rates: Rates
    worth: Rates


class _Row(msgspec.Struct, array_like=True):
    name: list[str]
    returns: bytes
    seconds: bytes


class _File(msgspec.Struct, array_like=True):
    version: int
    buckets: int
    rows: list[_Row]


class Estimator:
    """Rates of return by type. A pause that still lasts counts as seconds without a return. Not thread-safe.

    Each type's rates are those of the next coarser type, corrected by its own counts as far as these go (see
    `ctxreuse.pauses.hazard.shrink`): a tool that was never seen returns as tools do, one seen often as itself. At most
    ``most`` types are kept, 700 bytes each; the least recently used are forgotten.
    """

    def __init__(self, *, strength: float = 4.0, most: int = 8192) -> None:
        self._strength, self._most = strength, max(most, 8)
        self._counts: OrderedDict[_Type, _Counts] = OrderedDict()
        self._made: OrderedDict[Pause, _Made] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def away(self, pause: Pause, since: float, until: float) -> None:
        """Count a pause while its age went from ``since`` to ``until`` seconds."""
        if not (math.isfinite(since) and math.isfinite(until)) or until <= since:
            return
        since = max(since, 0.0)
        first, last = bucket(since), bucket(until)
        if first == last:  # most are short: one number is quicker than an array
            for name in pause.types():
                self._of(name).seconds[first] += until - since
            return
        seconds = exposure(since, until)
        for name in pause.types():
            self._of(name).seconds += seconds

    def returned(self, pause: Pause, age: float) -> None:
        """Count a pause that ended in a return at this age; `away` reports the seconds before it."""
        at = bucket(age)
        for name in pause.types():
            counts = self._of(name)
            counts.returns[at] += 1
            counts.changes += 1
            if counts.returns.sum() > _ENOUGH:
                counts.returns *= 0.5
                counts.seconds *= 0.5

    def _of(self, name: _Type) -> _Counts:
        counts = self._counts.get(name)
        if counts is None:
            counts = self._counts[name] = _Counts()
            if len(self._counts) > self._most:
                self._counts.popitem(last=False)
        self._counts.move_to_end(name)
        return counts

    def rates(self, pause: Pause) -> Rates:
        """Returns per second by bucket of age. Read-only."""
        return self._current(pause).rates

    def worth(self, pause: Pause) -> Rates:
        """Return the worth of keeping it by bucket of age, see `ctxreuse.pauses.hazard.worth`. Read-only."""
        return self._current(pause).worth

    def survival(self, pause: Pause, age: float, more: float) -> float:
        """Return the chance that a pause that has lasted ``age`` seconds lasts ``more`` seconds longer."""
        return survival(self.rates(pause), age, more)

    def _current(self, pause: Pause) -> _Made:
        found = [self._counts.get(name) for name in pause.types()]
        changes = tuple(counts.changes if counts is not None else 0 for counts in found)
        made = self._made.get(pause)
        if made is not None and (made.changes == changes or all(map(_close, made.changes, changes))):
            return made
        rates = prior()
        for counts in found:
            if counts is not None:
                rates = shrink(counts.returns, counts.seconds, rates, self._strength)
        made = self._made[pause] = _Made(changes, rates, worth(rates))
        self._made.move_to_end(pause)
        if len(self._made) > self._most:
            self._made.popitem(last=False)
        return made

    def dump(self) -> bytes:
        """Return what was learnt of all types but sessions, below 64 KiB: see `load`."""
        kept = ((name, counts) for name, counts in self._counts.items() if len(name) < 4)
        return pack_counts(Counts(name, counts.changes, counts.returns, counts.seconds) for name, counts in kept)

    def load(self, raw: bytes) -> bool:
        """Go on from what `dump` gave; False, and no change, if the bytes are damaged or another version's."""
        rows = unpack_counts(raw)
        if rows is None:
            return False
        self._counts.clear()
        for row in reversed(rows):
            counts = self._counts[row.name] = _Counts()
            counts.returns, counts.seconds, counts.changes = row.returns, row.seconds, int(row.changes)
        self._made.clear()
        return True

    def check(self) -> None:
        """Raise AssertionError where counts are negative, or a fine type counts more than a coarse one."""
        assert len(self._counts) <= self._most, "more types than there may be"
        for name, counts in self._counts.items():
            assert counts.returns.min() >= 0, f"negative returns of {name}"
            assert counts.seconds.min() >= 0, f"negative seconds of {name}"


def _close(old: int, new: int) -> bool:
    """Return True if rates are still good enough: an eighth more returns change little."""
    return new - old <= old // 8


def pack_counts(rows: Iterable[Counts]) -> bytes:
    """Encode the types that returned most, as far as they are kept."""
    kept = [
        _Row(list(row.name), row.returns.astype("<f4").tobytes(), row.seconds.astype("<f4").tobytes())
        for row in sorted(rows, key=lambda row: (-row.changes, row.name))
        if sum(len(part.encode("utf-8", "replace")) for part in row.name) <= _NAME
    ]
    return msgspec.msgpack.encode(_File(_VERSION, BUCKETS, kept[:_SAVED]))


def unpack_counts(raw: bytes) -> list[Counts] | None:
    """Decode `pack_counts`; None for anything else."""
    try:
        file = msgspec.msgpack.decode(raw, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if file.version != _VERSION or file.buckets != BUCKETS or len(file.rows) > _SAVED:
        return None
    rows: dict[_Type, Counts] = {}
    for row in file.rows:
        if len(row.name) > 3 or len(row.returns) != 4 * BUCKETS or len(row.seconds) != 4 * BUCKETS:
            return None
        returns, seconds = (np.frombuffer(part, "<f4").astype(np.float64) for part in (row.returns, row.seconds))
        for part in (returns, seconds):
            if not np.isfinite(part).all() or part.min() < 0 or part.max() > 1e12:
                return None
        if returns.sum() > 2 * _ENOUGH:
            return None
        rows[tuple(row.name)] = Counts(tuple(row.name), int(returns.sum()), returns, seconds)
    return list(rows.values())
