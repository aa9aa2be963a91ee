"""Where contexts are kept: a durable ledger of texts and a cache of blocks, on LMDB and in host memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ctxreuse.levels import EXACT
from ctxreuse.store.base import Coder, Entry, Progress, Reader, Store, StoreAdmin, StoreListing, StoreStats, WholeStore
from ctxreuse.store.blocks import BlockStore
from ctxreuse.store.ledger import Ledger
from ctxreuse.store.ledger_records import Hit, LedgerStats, NewTurn, Session, Turn
from ctxreuse.store.tiered import TieredStore
from ctxreuse.store.verify import Collected, Verdict, gc, verify

__all__ = [
    "BlockStore",
    "Coder",
    "Collected",
    "Entry",
    "Hit",
    "Ledger",
    "LedgerStats",
    "NewTurn",
    "Progress",
    "Reader",
    "Session",
    "Store",
    "StoreAdmin",
    "StoreListing",
    "StoreStats",
    "TieredStore",
    "Turn",
    "Verdict",
    "WholeStore",
    "gc",
    "open_store",
    "verify",
]


def open_store(
    path: str | os.PathLike[str] | None,
    *,
    capacity: int = 8_000_000_000,
    host_bytes: int = 256 << 20,
    policy: str = "duel",
    level: str = EXACT,
    demote: bool = True,
    readonly: bool = False,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
) -> TieredStore:
    """The cache in folder ``path`` with host memory in front of it, or in memory only where ``path`` is None.

    ``capacity``: bytes on disk; ``host_bytes``: memory for what is not yet on disk (for all, without a disk);
    ``policy``: what is evicted first. ``level``: at which blocks are kept on disk (``exact``, ``exact+rans``, or a
    lossy one for what its owner allows it for); ``demote``: encode what is cold smaller before anything is evicted.
    Raises ConfigError for an unknown policy or level, StoreOwnedError while another process writes there and StoreError
    for a path that cannot hold a store.
    """
    if path is None:
        return TieredStore(host_bytes)
    disk = BlockStore.open(
        path,
        capacity=capacity,
        policy=policy,
        level=level,
        demote=demote,
        readonly=readonly,
        progress=progress,
        clock=clock,
    )
    return TieredStore(0 if readonly else host_bytes, disk)
