"""Peers that gave false blocks: who is kept out, until when and why, in a small file that outlives the process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

__all__ = ["Quarantine", "Sentence"]

log = logging.getLogger(__name__)

_MAX_FILE = 4 << 20
_MAX_PEERS = 10_000


class Sentence(msgspec.Struct, frozen=True):
    """Kept out ``until`` (seconds since 1970) for ``reason``."""

    until: float
    reason: str


class Quarantine:
    """Names of peers with their sentences. Any thread may call.

    ``path``: where it is kept (None: in memory); a file that cannot be read counts as empty, one that cannot be written
    is logged: neither stops a node. ``seconds``: how long a sentence lasts; ``clock``: seconds since 1970.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, seconds: float, clock: Callable[[], float]) -> None:
        self._path = Path(path) if path is not None else None
        self._seconds, self._clock = seconds, clock
        self._lock = threading.Lock()
        self._held = self._read()

    def add(self, name: str, reason: str) -> None:
        """Keep ``name`` out from now on; one line in the log unless it is already."""
        with self._lock:
            new = self._find(name) is None
            self._held.pop(name, None)
            while len(self._held) >= _MAX_PEERS:
                del self._held[next(iter(self._held))]
            self._held[name] = Sentence(self._clock() + self._seconds, reason)
            self._write()
        if new:
            log.warning("peer %s is quarantined for %.0f s: %s", name, self._seconds, reason)

    def reason(self, name: str) -> str | None:
        """Why ``name`` is kept out now; None if it is not."""
        with self._lock:
            found = self._find(name)
            return found.reason if found is not None else None

    def clear(self, name: str) -> bool:
        """Let ``name`` in again; False if it was not kept out."""
        with self._lock:
            known = self._held.pop(name, None) is not None
            if known:
                self._write()
            return known

    def names(self) -> Mapping[str, Sentence]:
        """All that are kept out now."""
        with self._lock:
            return {name: held for name, held in self._held.items() if self._find(name) is not None}

    def _find(self, name: str) -> Sentence | None:
        held, now = self._held.get(name), self._clock()
        if held is not None and held.until - now > self._seconds:
            # The clock was set back. It begins anew: that frees nobody, nor keeps anybody out for years.
            held = self._held[name] = Sentence(now + self._seconds, held.reason)
        return held if held is not None and held.until > now else None

    def _read(self) -> dict[str, Sentence]:
        if self._path is None:
            return {}
        try:
            with open(self._path, "rb") as file:
                raw = file.read(_MAX_FILE)
            return msgspec.json.decode(raw, type=dict[str, Sentence])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("the list of quarantined peers cannot be read and counts as empty: %s", error)
            return {}

    def _write(self) -> None:
        if self._path is None:
            return
        beside = self._path.with_name(self._path.name + ".new")
        try:
            beside.write_bytes(msgspec.json.encode(self._held))
            os.replace(beside, self._path)
        except OSError as error:
            log.warning("the list of quarantined peers cannot be written: %s", error)
