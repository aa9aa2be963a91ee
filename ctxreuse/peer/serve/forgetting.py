"""Blocks that their owner wants deleted: dropped at once, and out of the files when the cache is next rewritten."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ctxreuse.errors import StoreError
from ctxreuse.peer.serve.owners import OwnerIndex
from ctxreuse.private import write_private
from ctxreuse.store.base import Store

__all__ = ["DeletionMark", "Forgetting"]

log = logging.getLogger(__name__)

#: Seconds in which a deleted block that was still on its way here is dropped again.
_LATE = 60.0


class DeletionMark:
    """A file that says when the first deletion was since the cache was rewritten. Any thread may call."""

    def __init__(self, file: Path, clock: Callable[[], float]) -> None:
        self._file, self._clock, self._lock = file, clock, threading.Lock()
        self._count = 0

    def set(self) -> None:
        """Note a deletion. Raises OSError."""
        with self._lock:
            self._count += 1
            if self.since() is None:
                write_private(self._file, msgspec.json.encode(self._clock()))

    def since(self) -> float | None:
        """Return seconds since 1970; None without a deletion."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=float)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return 0.0

    def compacted(self, work: Callable[[], object]) -> bool:
        """Run ``work``, which rewrites the cache, if anything was deleted; a deletion meanwhile stands for the next
        time. Raises what ``work`` raises."""
        if self.since() is None:
            return False
        before = self._count
        work()
        with self._lock:
            if self._count == before:
                self._file.unlink(missing_ok=True)
        return True


class Forgetting:
    """Deletes blocks for their owners. One thread calls."""

    def __init__(self, store: Store, owners: OwnerIndex, mark: DeletionMark, clock: Callable[[], float]) -> None:
        self._store, self._owners, self._mark, self._clock = store, owners, mark, clock
        self._late: dict[bytes, tuple[str, float]] = {}

    def forget(self, tenant: str, keys: Sequence[bytes]) -> int:
        """Drop those of ``keys`` that are the tenant's, and all below them; returns how many were stored.

        Raises StoreError if it could not be noted that the files still have them.
        """
        try:
            self._mark.set()
        except OSError as error:
            raise StoreError(f"a deletion cannot be noted: {error.strerror}") from None
        until = self._clock() + _LATE
        self._late |= dict.fromkeys(keys, (tenant, until))
        return self._drop()

    def settle(self) -> None:
        """Drop deleted blocks that arrived since."""
        if self._late:
            self._drop()

    def _drop(self) -> int:
        now, dropped = self._clock(), 0
        for key, (tenant, until) in list(self._late.items()):
            owner = self._owners.owner(key) or self._owners.withheld(key)
            if owner is not None and owner.tenant == tenant:
                self._store.drop(key, "forgotten")
                dropped += 1
            if not 0 <= until - now <= _LATE:
                del self._late[key]
        if dropped:
            with contextlib.suppress(StoreError):
                self._owners.refresh()
        return dropped
