"""Announcing to one edge what its tenant may fetch here: snapshot first, then changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ctxreuse.bus.base import Service
from ctxreuse.bus.session import Limits
from ctxreuse.bus.wire import PREFIX_BYTES, Announce

__all__ = ["Telling"]

#: Prefixes in one message: 32 KiB, little beside a payload.
_CHUNK = 4096
#: Looks from one snapshot to the next, whatever the peer says it has lost, or the service has forgotten.
_SNAPSHOTS = 8


def _row(keys: Sequence[bytes]) -> bytes:
    return b"".join(key[:PREFIX_BYTES] for key in keys)


class Telling:
    """What one peer has been told. Holds 8 bytes a key while a snapshot is under way, else a version number."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self._service, self._limits = service, limits
        self._tenant: str | None = None
        self._seq = self._version = 0
        self._base = self._target = 0
        self._added = self._removed = b""
        self._part = self._parts = 0
        self._due = self._snapshot = 0.0

    @property
    def due(self) -> float:
        """When to look again, in session time; never while there is something to tell."""
        return math.inf if self.pending or self._tenant is None else self._due

    @property
    def pending(self) -> bool:
        """True while there is something to tell."""
        return self._part < self._parts

    def begin(self, tenant: str, since: int, now: float) -> None:
        """A peer was admitted that knows version ``since`` (0: nothing)."""
        self.stop()
        self._tenant, self._version, self._due, self._snapshot = tenant, since, now, now

    def restart(self) -> None:
        """The peer asks for a snapshot: it gets one, but not one after another."""
        self._version = self._parts = self._part = 0

    def stop(self) -> None:
        """The peer is gone."""
        self._tenant = None
        self._seq = 0
        self._added = self._removed = b""
        self.restart()

    def look(self, now: float) -> None:
        """Ask the service for changes, unless the last ones are still being told or it is too soon."""
        if self._tenant is None or self.pending or now < self._due:
            return
        self._due = now + self._limits.announce_every
        changes = self._service.changes(self._tenant, self._version) if self._version else None
        if changes is not None:
            version, added, removed = changes
            if added or removed or version != self._version:
                self._plan(self._version, version, _row(added), _row(removed))
            return
        if now < self._snapshot:
            return
        self._snapshot = now + _SNAPSHOTS * self._limits.announce_every
        version, held = self._service.held(self._tenant)
        if len(held) <= self._limits.announced:  # else matches cost a round trip
            self._plan(0, version, _row(held), b"")

    def _plan(self, base: int, version: int, added: bytes, removed: bytes) -> None:
        self._base, self._target, self._added, self._removed = base, version, added, removed
        most = max(len(added), len(removed)) // PREFIX_BYTES
        self._part, self._parts = 0, max(1, -(-most // _CHUNK))

    def next(self) -> Announce | None:
        """The next part, None if there is none."""
        if not self.pending:
            return None
        step = _CHUNK * PREFIX_BYTES
        here = slice(self._part * step, (self._part + 1) * step)
        self._seq += 1
        message = Announce(
            self._seq, self._base, self._target, self._part, self._parts, self._added[here], self._removed[here]
        )
        self._part += 1
        if self._part == self._parts:
            self._version = self._target
            self._added = self._removed = b""
        return message
