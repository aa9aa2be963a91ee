"""Where contexts are kept: a durable ledger of texts and a cache of blocks, on LMDB and in host memory."""

from __future__ import annotations

from ctxreuse.store.base import Progress, Reader, Store, StoreAdmin, StoreStats
from ctxreuse.store.blocks import BlockStore
from ctxreuse.store.ledger import Ledger
from ctxreuse.store.ledger_records import Hit, LedgerStats, NewTurn, Session, Turn

__all__ = [
    "BlockStore",
    "Hit",
    "Ledger",
    "LedgerStats",
    "NewTurn",
    "Progress",
    "Reader",
    "Session",
    "Store",
    "StoreAdmin",
    "StoreStats",
    "Turn",
]
