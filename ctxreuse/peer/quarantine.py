"""Quarantine of peers that sent forged blocks: until when and why, in a small file that outlives the process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ctxreuse.clock import SYSTEM_CLOCK, Clock, SteadyClock
from ctxreuse.private import write_private

__all__ = ["Quarantine", "QuarantineEntry"]

log = logging.getLogger(__name__)

_MAX_FILE = 4 << 20
_MAX_PEERS = 10_000


class QuarantineEntry(msgspec.Struct, frozen=True):
    """Kept out ``until`` (seconds since 1970), for ``reason``."""

    until: float
    reason: str


class Quarantine:
    """Names of peers with their entries. Any thread may call.

    Args:
        path: The file (None: in memory); an unreadable one counts as empty, failing to write is logged.
        seconds: How long an entry lasts.
        clock: If it is set meanwhile, entries last neither shorter nor longer by that.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path = Path(path) if path is not None else None
        self._seconds, self._clock = seconds, SteadyClock(clock=clock).now
        self._lock = threading.Lock()
        self._entries = self._read()

    def add(self, name: str, reason: str) -> None:
        """Keep ``name`` out from now on; logged unless it is already."""
        with self._lock:
            new = self._find(name) is None
            self._entries.pop(name, None)
            while len(self._entries) >= _MAX_PEERS:
                del self._entries[next(iter(self._entries))]
            self._entries[name] = QuarantineEntry(self._clock() + self._seconds, reason)
            self._write()
        if new:
            log.warning("peer %s is quarantined for %.0f s: %s", name, self._seconds, reason)

    def reason(self, name: str) -> str | None:
        """Return why ``name`` is kept out now; None if it is not."""
        with self._lock:
            found = self._find(name)
            return found.reason if found is not None else None

    def clear(self, name: str) -> bool:
        """Let ``name`` in again; returns False if it was not kept out."""
        with self._lock:
            known = self._entries.pop(name, None) is not None
            if known:
                self._write()
            return known

    def names(self) -> Mapping[str, QuarantineEntry]:
        """Return all that are kept out now."""
        with self._lock:
            return {name: entry for name, entry in self._entries.items() if self._find(name) is not None}

    def _find(self, name: str) -> QuarantineEntry | None:
        entry, now = self._entries.get(name), self._clock()
        if entry is not None and entry.until - now > self._seconds:
            # The clock was set back between two runs: restart the entry: nobody is freed, or kept out for years.
            entry = self._entries[name] = QuarantineEntry(now + self._seconds, entry.reason)
        return entry if entry is not None and entry.until > now else None

    def _read(self) -> dict[str, QuarantineEntry]:
        if self._path is None:
            return {}
        try:
            with open(self._path, "rb") as file:
                raw = file.read(_MAX_FILE)
            return msgspec.json.decode(raw, type=dict[str, QuarantineEntry])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("the list of quarantined peers cannot be read and counts as empty: %s", error)
            return {}

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_private(self._path, msgspec.json.encode(self._entries))
        except OSError as error:
            log.warning("the list of quarantined peers cannot be written: %s", error)
