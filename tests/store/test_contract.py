"""Every store of ours keeps the contract: on disk, in memory, and both together."""

from __future__ import annotations

from pathlib import Path

from ctxreuse.store import BlockStore, TieredStore
from ctxreuse.testing.store import StoreContract


class TestDisk(StoreContract):
    def open(self, folder: Path) -> BlockStore:
        return BlockStore.open(folder, capacity=1 << 20)

    def open_by_recency(self, folder: Path) -> BlockStore:
        return BlockStore.open(folder, capacity=1 << 20, policy="lru")


class TestMemory(StoreContract):
    def open(self, folder: Path) -> TieredStore:
        return TieredStore(1 << 20)


class TestTiers(StoreContract):
    def open(self, folder: Path) -> TieredStore:
        return TieredStore(1 << 20, BlockStore.open(folder, capacity=1 << 20))

    def open_by_recency(self, folder: Path) -> TieredStore:
        return TieredStore(1 << 20, BlockStore.open(folder, capacity=1 << 20, policy="lru"))


class TestNoMemory(StoreContract):
    def open(self, folder: Path) -> TieredStore:
        return TieredStore(0, BlockStore.open(folder, capacity=1 << 20))

    def open_by_recency(self, folder: Path) -> TieredStore:
        return TieredStore(0, BlockStore.open(folder, capacity=1 << 20, policy="lru"))
