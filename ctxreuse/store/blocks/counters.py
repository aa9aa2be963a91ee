"""Counts of a store from opening to closing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ctxreuse.block.levels import family
from ctxreuse.store.types import StoreStats

__all__ = ["StoreCounters", "merge_stats"]


class StoreCounters:
    """Counts by reason, as in `StoreStats`. Not thread-safe: the store's lock guards it."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.recompressed: Counter[str] = Counter()
        self.hits = self.puts = self.duplicates = self.evicted = 0

    def stats(self, sizes: tuple[int, int, int], levels: Mapping[str, int], **figures: Any) -> StoreStats:
        """Return `StoreStats`.

        Args:
            sizes: blocks, states and their bytes.
            levels: blocks by level, profile included.
            figures: the fields that are not counted here.
        """
        by_name: Counter[str] = Counter()
        for level, count in levels.items():
            by_name[family(level)] += count
        return StoreStats(
            blocks=sizes[0],
            states=sizes[1],
            nbytes=sizes[2],
            levels=dict(by_name),
            hits=self.hits,
            misses=dict(self.misses),
            puts=self.puts,
            duplicates=self.duplicates,
            refused=dict(self.refused),
            evicted=self.evicted,
            dropped=dict(self.dropped),
            errors=dict(self.errors),
            recompressed=dict(self.recompressed),
            **figures,
        )


def merge_stats(host: StoreStats, disk: StoreStats) -> StoreStats:
    """Return the figures of two tiers as one store's."""
    figures: dict[str, Any] = {name: getattr(disk, name) for name in StoreStats.__struct_fields__}
    figures |= {name: getattr(host, name) for name in ("hits", "misses", "puts", "refused")}
    for name in ("blocks", "states", "tokens", "nbytes", "capacity", "evicted"):
        figures[name] = getattr(host, name) + getattr(disk, name)
    figures |= {name: getattr(host, name) for name in ("unwritten", "unwritten_bytes")}
    for name in ("dropped", "levels"):
        figures[name] = dict(Counter(getattr(host, name)) + Counter(getattr(disk, name)))
    return StoreStats(**figures)
