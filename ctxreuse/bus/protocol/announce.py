"""Announcements of stored keys: the cloud's messages to an edge, and the set that the edge keeps of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ctxreuse.bus.protocol.base import Service
from ctxreuse.bus.protocol.messages import MAX_PREFIXES, PREFIX_BYTES, Announce
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.protocol.wire import split_keys

__all__ = ["AnnouncedKeys", "Announcer"]

#: Prefixes in one message: 32 KiB, little beside a payload.
_CHUNK = 4096
#: Looks at the service from one snapshot to the next, however often the peer asks or the service forgets.
_SNAPSHOTS = 8


def _row(keys: Sequence[bytes]) -> bytes:
    return b"".join(key[:PREFIX_BYTES] for key in keys)


class Announcer:
    """The cloud's side for one peer: a snapshot, then changes. Holds 8 bytes per key while a snapshot is sent."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self._service, self._limits = service, limits
        self._tenant: str | None = None
        self._seq = self._version = 0
        self._base = self._target = 0
        self._added = self._removed = self._withdrawn = b""
        self._known = b""  # the withdrawals that this connection knows
        self._part = self._parts = 0
        self._due = self._snapshot = 0.0

    @property
    def due(self) -> float:
        """Session time of the next look; infinite while there is something to send."""
        return math.inf if self.pending or self._tenant is None else self._due

    @property
    def pending(self) -> bool:
        """True while there is something to send."""
        return self._part < self._parts

    def begin(self, tenant: str, since: int, now: float) -> None:
        """Start for a peer that knows version ``since`` (0: nothing)."""
        self.stop()
        self._tenant, self._version, self._due, self._snapshot = tenant, since, now, now

    def restart(self) -> None:
        """Send a snapshot again at the peer's request, but not more often than `_SNAPSHOTS` allows."""
        self._version = self._parts = self._part = 0

    def stop(self) -> None:
        """End with the peer's connection."""
        self._tenant = None
        self._seq = 0
        self._added = self._removed = self._withdrawn = self._known = b""
        self.restart()

    def look(self, now: float) -> None:
        """Ask the service for changes if it is time and the last ones are sent."""
        if self._tenant is None or self.pending or now < self._due:
            return
        self._due = now + self._limits.announce_every
        changes = self._service.changes(self._tenant, self._version) if self._version else None
        if changes is not None:
            version, added, removed = changes
            if added or removed or version != self._version or self._service.withdrawn(self._tenant) != self._known:
                self._plan(self._version, version, _row(added), _row(removed))
            return
        if now < self._snapshot:
            return
        self._snapshot = now + _SNAPSHOTS * self._limits.announce_every
        version, keys = self._service.snapshot(self._tenant)
        if len(keys) <= self._limits.announced:  # else matches cost a round trip
            self._plan(0, version, _row(keys), b"")

    def _plan(self, base: int, version: int, added: bytes, removed: bytes) -> None:
        self._base, self._target, self._added, self._removed = base, version, added, removed
        withdrawn = self._service.withdrawn(self._tenant) if self._tenant is not None else b""
        self._withdrawn, self._known = withdrawn if withdrawn != self._known else b"", withdrawn
        most = max(len(added), len(removed), len(self._withdrawn)) // PREFIX_BYTES
        self._part, self._parts = 0, max(1, -(-most // _CHUNK))

    def next(self) -> Announce | None:
        """Return the next message, None if there is none."""
        if not self.pending:
            return None
        step = _CHUNK * PREFIX_BYTES
        here = slice(self._part * step, (self._part + 1) * step)
        self._seq += 1
        rows = self._added[here], self._removed[here], self._withdrawn[here]
        message = Announce(self._seq, self._base, self._target, self._part, self._parts, *rows)
        self._part += 1
        if self._part == self._parts:
            self._version = self._target
            self._added = self._removed = self._withdrawn = b""
        return message


class AnnouncedKeys:
    """The edge's side: key prefixes announced by one cloud, at most ``limit``. One thread applies; any may read.

    A set beyond the limit is dropped until the next snapshot; matching then takes a round trip.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.epoch = 0
        self.version = 0  # 0: unknown
        self._seq = self._part = 0
        self._resyncs = False  # a snapshot was requested and has not begun
        self._prefixes: set[bytes] = set()
        #: All that was withdrawn, as far as it is known; outlives connections.
        self.withdrawn: frozenset[bytes] = frozenset()

    def begin(self, epoch: int) -> None:
        """Start a connection; another epoch, or an announcement that was cut off, voids the set."""
        if epoch != self.epoch or self._part:
            self._forget()
        self.epoch, self._seq, self._resyncs = epoch, 0, False

    def apply(self, message: Announce) -> bool:
        """Apply one announcement; returns False if a snapshot must be requested (once, until it begins)."""
        follows, self._seq = message.seq == self._seq + 1, message.seq
        if message.withdrawn:
            more = split_keys(message.withdrawn, PREFIX_BYTES)
            self.withdrawn = frozenset(more) | (self.withdrawn if len(self.withdrawn) < MAX_PREFIXES else frozenset())
        if message.part == 0 and message.base == 0:
            self._forget()
            self._resyncs = False
        elif self._resyncs:
            return True
        elif not follows or message.part != self._part or (message.part == 0 and message.base != self.version):
            self._forget()
            self._resyncs = True
            return False
        prefixes = self._prefixes
        prefixes.difference_update(split_keys(message.removed, PREFIX_BYTES))
        prefixes.update(split_keys(message.added, PREFIX_BYTES))
        last = message.part == message.parts - 1
        self._part = 0 if last else message.part + 1
        self.version = message.version if last else 0
        if len(prefixes) > self.limit:
            self._forget()
            self._resyncs = True  # ignore what follows; the next snapshot may be smaller
        return True

    def _forget(self) -> None:
        self.version = self._part = 0
        self._prefixes = set()

    def leading(self, keys: Sequence[bytes]) -> int | None:
        """Count the leading keys that are announced; None while unknown."""
        prefixes = self._prefixes
        if not self.version:
            return None
        return next((i for i, key in enumerate(keys) if key[:PREFIX_BYTES] not in prefixes), len(keys))

    def count(self) -> int | None:
        """Return the number of announced keys; None while unknown."""
        return len(self._prefixes) if self.version else None

    def check(self) -> None:
        """Raise AssertionError if the set is inconsistent."""
        assert len(self._prefixes) <= self.limit
        assert self.version or self._part or not self._prefixes
