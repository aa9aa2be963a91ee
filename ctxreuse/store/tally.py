"""What a store counts from opening to closing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from ctxreuse.levels import short
from ctxreuse.store.base import StoreStats

__all__ = ["Tally"]


class Tally:
    """Counts by reason, as ``StoreStats`` explains them. Not thread-safe: the store's lock guards it."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.demoted: Counter[str] = Counter()
        self.hits = self.puts = self.duplicates = self.evicted = 0

    def drop(self, count: int, reason: str, others: str) -> None:
        """Count ``count`` dropped entries, the first under ``reason`` and the rest under ``others``."""
        for i in range(count):
            self.dropped[others if i else reason] += 1

    def stats(
        self,
        *,
        held: tuple[int, int, int],
        tokens: int,
        capacity: int,
        queued: tuple[int, int] = (0, 0),
        file_bytes: int = 0,
        recovered: str = "",
        levels: Mapping[str, int] = MappingProxyType({}),
    ) -> StoreStats:
        """The figures as a value. ``held``: blocks, states and their bytes; ``queued``: items and bytes; ``levels``:
        blocks by level, cards included."""
        shorter: Counter[str] = Counter()
        for level, count in levels.items():
            shorter[short(level)] += count
        return StoreStats(
            blocks=held[0],
            states=held[1],
            tokens=tokens,
            nbytes=held[2],
            capacity=capacity,
            queued=queued[0],
            queued_bytes=queued[1],
            file_bytes=file_bytes,
            hits=self.hits,
            misses=dict(self.misses),
            puts=self.puts,
            duplicates=self.duplicates,
            refused=dict(self.refused),
            evicted=self.evicted,
            dropped=dict(self.dropped),
            errors=dict(self.errors),
            recovered=recovered,
            levels=dict(shorter),
            demoted=dict(self.demoted),
        )
