"""Every store of ours keeps levels apart: on disk, in memory, and both together."""

from __future__ import annotations

from pathlib import Path

from ctxreuse.store import BlockStore, TieredStore
from ctxreuse.testing.store_levels import StoreLevelsContract


class TestDisk(StoreLevelsContract):
    def open(self, folder: Path) -> BlockStore:
        return BlockStore.open(folder, capacity=2 << 20)


class TestMemory(StoreLevelsContract):
    def open(self, folder: Path) -> TieredStore:
        return TieredStore(2 << 20)


class TestTiers(StoreLevelsContract):
    def open(self, folder: Path) -> TieredStore:
        return TieredStore(2 << 20, BlockStore.open(folder, capacity=2 << 20))


class TestNoMemory(StoreLevelsContract):
    def open(self, folder: Path) -> TieredStore:
        return TieredStore(0, BlockStore.open(folder, capacity=2 << 20))
