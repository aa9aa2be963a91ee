"""Where contexts are stored: a durable ledger of texts and a cache of blocks, on LMDB and in host memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Unpack

import msgspec

from ctxreuse.config import StoreConfig
from ctxreuse.errors import StoreError, StoreOwnedError
from ctxreuse.store.backup import Backup, backup, restore
from ctxreuse.store.base import BlockCodec, Reader, Store
from ctxreuse.store.blocks.store import BlockStore
from ctxreuse.store.ledger.ledger import Ledger, new_session_id
from ctxreuse.store.ledger.records import Hit, LedgerStats, NewTurn, Session, Turn
from ctxreuse.store.ledger.rescue import Rescued, rescue
from ctxreuse.store.tiered import TieredStore
from ctxreuse.store.types import Entry, Holding, PolicyStats, Progress, Removal, StoreOptions, StoreStats
from ctxreuse.store.verify import Collected, Verdict, gc, verify

__all__ = [
    "Backup",
    "BlockCodec",
    "BlockStore",
    "Collected",
    "Entry",
    "Hit",
    "Holding",
    "Ledger",
    "LedgerStats",
    "NewTurn",
    "PolicyStats",
    "Progress",
    "Reader",
    "Removal",
    "Rescued",
    "Session",
    "Store",
    "StoreOptions",
    "StoreStats",
    "TieredStore",
    "Turn",
    "Verdict",
    "backup",
    "gc",
    "new_session_id",
    "open_store",
    "rescue",
    "restore",
    "verify",
]

log = logging.getLogger(__name__)


def open_store(
    path: str | os.PathLike[str] | StoreConfig | None,
    *,
    readonly: bool = False,
    memory_fallback: bool = False,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
    **options: Unpack[StoreOptions],
) -> TieredStore:
    """Open the cache of blocks in a store's folder, with host memory in front of it.

    Args:
        path: the folder, or the store's settings; None: in memory only.
        readonly: open beside the process that writes.
        memory_fallback: go on in memory only if the disk fails.
        progress: called as entries are verified after a crash.
        clock: seconds since 1970.
        options: settings that differ, such as ``capacity=4 << 30``.

    Raises:
        ConfigError: an unknown policy or level.
        StoreOwnedError: another process writes there.
        StoreError: the path cannot hold a store.
    """
    config = path if isinstance(path, StoreConfig) else StoreConfig(path=os.fspath(path or ""))
    config = msgspec.structs.replace(config, **options)
    if path is None:
        return TieredStore(config.host_bytes)
    try:
        disk = BlockStore.open(config, readonly=readonly, progress=progress, clock=clock)
    except StoreOwnedError:
        raise
    except StoreError as error:
        if not memory_fallback:
            raise
        log.warning("KV is kept in memory only: %s", error)  # it is a cache: all works, only slower
        return TieredStore(config.host_bytes)
    return TieredStore(0 if readonly else config.host_bytes, disk)
