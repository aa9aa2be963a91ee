"""What a store counts from opening to closing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from ctxreuse.levels import short
from ctxreuse.store.base import StoreStats
from ctxreuse.store.policy import Standing

__all__ = ["Tally", "together"]


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
        standing: Standing | None = None,
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
            standing=standing,
        )


def together(host: StoreStats, disk: StoreStats) -> StoreStats:
    """The figures of two tiers as one store's."""
    return StoreStats(
        blocks=host.blocks + disk.blocks,
        states=host.states + disk.states,
        tokens=host.tokens + disk.tokens,
        nbytes=host.nbytes + disk.nbytes,
        capacity=host.capacity + disk.capacity,
        queued=disk.queued,
        queued_bytes=disk.queued_bytes,
        file_bytes=disk.file_bytes,
        hits=host.hits,
        misses=host.misses,
        puts=host.puts,
        duplicates=disk.duplicates,
        refused=host.refused,
        evicted=host.evicted + disk.evicted,
        dropped=dict(Counter(host.dropped) + Counter(disk.dropped)),
        errors=disk.errors,
        recovered=disk.recovered,
        levels=dict(Counter(host.levels) + Counter(disk.levels)),
        demoted=disk.demoted,
        standing=disk.standing,
    )
