"""The store's figures in the metrics, read at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from ctxreuse.metrics.registry import Metrics, level_label
from ctxreuse.metrics.table import LEVELS

if TYPE_CHECKING:
    from ctxreuse.store.types import PolicyStats, StoreStats

__all__ = ["watch_store"]

_CORRUPT = ("corrupt", "truncated")


def watch_store(
    metrics: Metrics,
    whole: Callable[[], StoreStats],
    disk: Callable[[], StoreStats] | None = None,
    device: Callable[[], int] | None = None,
) -> None:
    """Feed the ``ctxreuse_store_*`` rows at each scrape.

    ``whole``: figures of all tiers of a store together; ``disk``: those of its disk tier, if it has one (the rest is
    host memory); ``device``: bytes of KV that stay in the engine between requests.
    """

    def update() -> None:
        total, below = whole(), disk() if disk is not None else None
        tiers = {"disk": below, "host": total}
        for tier, figures in tiers.items():
            less = below if tier == "host" else None
            for name, field in (
                ("ctxreuse_store_bytes", "nbytes"),
                ("ctxreuse_store_capacity_bytes", "capacity"),
                ("ctxreuse_store_blocks", "blocks"),
            ):
                amount = getattr(figures, field, 0) - getattr(less, field, 0)
                metrics.set(name, max(amount, 0), tier)  # the two were not read at the same moment
        if device is not None:
            metrics.set("ctxreuse_store_bytes", device(), "device")
        metrics.total("ctxreuse_store_evicted_blocks_total", total.evicted)
        metrics.total("ctxreuse_store_corrupt_blocks_total", sum(total.dropped.get(why, 0) for why in _CORRUPT))
        levels: Counter[str] = Counter(dict.fromkeys(LEVELS, 0))
        for level, count in total.levels.items():
            levels[level_label(level)] += count
        for level, count in levels.items():
            metrics.set("ctxreuse_store_level_blocks", count, level)
        steps: Counter[tuple[str, str]] = Counter()
        for step, count in total.recompressed.items():
            before, _, to = step.partition(">")
            steps[level_label(before), level_label(to)] += count
        for (before, to), count in steps.items():
            metrics.total("ctxreuse_store_recompressed_blocks_total", count, before, to)
        for why, count in total.refused.items():
            metrics.total("ctxreuse_store_refused_puts_total", count, why)
        for why, count in (below.refused if below is not None else {}).items():
            metrics.total("ctxreuse_store_disk_refused_puts_total", count, why)
        metrics.set("ctxreuse_store_failing", total.failing)
        metrics.set("ctxreuse_store_unwritten_bytes", total.unwritten_bytes)

        if total.policy is not None:
            _compare_policies(metrics, total.policy)

    metrics.watch(update)


def _compare_policies(metrics: Metrics, policy: PolicyStats) -> None:
    for name, tokens in {**policy.expert_hit_tokens, "real": policy.hit_tokens}.items():
        metrics.total("ctxreuse_policy_hit_tokens_total", tokens, name)
    for name, weight in policy.weights.items():
        metrics.set("ctxreuse_policy_weight", weight, "swift" if name == "greedy" else name)
    for name in policy.expert_hit_tokens:
        metrics.set("ctxreuse_policy_leading", name == policy.leader, name)
    metrics.total("ctxreuse_policy_switches_total", policy.switches)
    metrics.total("ctxreuse_policy_lookup_tokens_total", policy.lookup_tokens)
