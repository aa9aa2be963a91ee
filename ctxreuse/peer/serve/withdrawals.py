"""Blocks that are taken back because of who gave them: dropped here, and named to the peers that may hold copies."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from ctxreuse.bus.protocol.messages import MAX_PREFIXES, PREFIX_BYTES
from ctxreuse.errors import StoreError
from ctxreuse.peer.serve.owners import OwnerIndex
from ctxreuse.private import write_private
from ctxreuse.store.base import Store

__all__ = ["Withdrawals"]

log = logging.getLogger(__name__)

_MAX_FILE = 64 << 20
#: Seconds for what still waits to be written.
_FLUSH = 60.0


class Withdrawals:
    """What was dropped of each tenant, as prefixes of keys, in ``file``: peers that were away get it later.

    One thread calls; of a tenant the newest `MAX_PREFIXES` are kept.
    """

    def __init__(self, store: Store, owners: OwnerIndex, file: str | os.PathLike[str]) -> None:
        self._store, self._owners, self._file = store, owners, Path(file)
        self._prefixes = self._read()
        self._threads: list[threading.Thread] = []

    def of(self, tenant: str) -> bytes:
        """Return the prefixes of all keys that were withdrawn from a tenant, in a row."""
        return self._prefixes.get(tenant, b"")

    def withdraw(self, givers: Collection[bytes]) -> int:
        """Drop all that these peers gave, and what is stored below it; returns the number of their blocks."""
        keys = self._given(givers)
        self._tell(keys)
        for key in keys:
            self._store.drop(key, "audit")
        if keys:
            log.warning("%d blocks are dropped because of who gave them", len(keys))
            # What waits to be written would come back; nobody who may ask waits for that.
            thread = threading.Thread(target=self._drop_late, args=(frozenset(givers),), name="ctxreuse-withdraw")
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()
        return len(keys)

    def close(self) -> None:
        """Wait until all is dropped."""
        for thread in self._threads:
            thread.join()

    def _given(self, givers: Collection[bytes]) -> list[bytes]:
        return [key for key, giver in self._store.givers().items() if giver in givers]

    def _drop_late(self, givers: frozenset[bytes]) -> None:
        try:
            self._store.flush(_FLUSH)
        except StoreError as error:
            log.warning("withdrawn blocks may still be written: %s", error)
        for key in self._given(givers):
            self._store.drop(key, "audit")

    def _tell(self, keys: Sequence[bytes]) -> None:
        rows: dict[str, list[bytes]] = {}
        for key in keys:
            namespace = self._owners.owner(key)
            if namespace is not None:  # nobody was sent the others
                rows.setdefault(namespace.tenant, []).append(key[:PREFIX_BYTES])
        for tenant, prefixes in rows.items():
            known = set(_cut(self.of(tenant)))
            more = b"".join(prefix for prefix in prefixes if prefix not in known)
            self._prefixes[tenant] = (self.of(tenant) + more)[-MAX_PREFIXES * PREFIX_BYTES :]
        if rows:
            try:
                write_private(self._file, msgspec.msgpack.encode(self._prefixes))
            except OSError as error:
                log.warning("the list of withdrawn blocks cannot be written: %s", error)

    def _read(self) -> dict[str, bytes]:
        try:
            with open(self._file, "rb") as file:
                found = msgspec.msgpack.decode(file.read(_MAX_FILE), type=dict[str, bytes])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("the list of withdrawn blocks cannot be read and counts as empty: %s", error)
            return {}
        return {tenant: row for tenant, row in found.items() if not len(row) % PREFIX_BYTES}


def _cut(row: bytes) -> list[bytes]:
    return [row[at : at + PREFIX_BYTES] for at in range(0, len(row), PREFIX_BYTES)]
