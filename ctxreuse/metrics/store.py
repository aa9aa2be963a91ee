"""The store's figures in the metrics, read when somebody looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from ctxreuse.metrics.registry import Metrics, how_kept

__all__ = ["Figures", "watch_store"]

_CORRUPT = ("corrupt", "truncated")


class Standing(Protocol):
    """What is read of `ctxreuse.store.policy.Standing`."""

    @property
    def leader(self) -> str: ...
    @property
    def switches(self) -> int: ...
    @property
    def asked(self) -> int: ...
    @property
    def real(self) -> int: ...
    @property
    def hits(self) -> Mapping[str, int]: ...
    @property
    def weights(self) -> Mapping[str, float]: ...


class Figures(Protocol):
    """What is read of `ctxreuse.store.StoreStats`."""

    @property
    def blocks(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def refused(self) -> Mapping[str, int]: ...
    @property
    def dropped(self) -> Mapping[str, int]: ...
    @property
    def levels(self) -> Mapping[str, int]: ...
    @property
    def demoted(self) -> Mapping[str, int]: ...
    @property
    def standing(self) -> Standing | None: ...


def watch_store(
    metrics: Metrics,
    whole: Callable[[], Figures],
    disk: Callable[[], Figures] | None = None,
    device: Callable[[], int] | None = None,
) -> None:
    """Feed the ``ctxreuse_store_*`` rows at each scrape.

    ``whole``: figures of all tiers of a store together; ``disk``: those of its disk tier, if it has one (the rest is
    host memory); ``device``: bytes of KV that stay in the engine between requests.
    """

    def look() -> None:
        every, below = whole(), disk() if disk is not None else None
        tiers = {"disk": below, "host": every}
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
        metrics.total("ctxreuse_store_evicted_blocks_total", every.evicted)
        metrics.total("ctxreuse_store_corrupt_blocks_total", sum(every.dropped.get(why, 0) for why in _CORRUPT))
        kept: Counter[str] = Counter(dict.fromkeys(("exact", "packed", "lossy", "approx"), 0))
        for level, count in every.levels.items():
            kept[how_kept(level)] += count
        for level, count in kept.items():
            metrics.set("ctxreuse_store_level_blocks", count, level)
        steps: Counter[tuple[str, str]] = Counter()
        for step, count in every.demoted.items():
            before, _, to = step.partition(">")
            steps[how_kept(before), how_kept(to)] += count
        for (before, to), count in steps.items():
            metrics.total("ctxreuse_store_demoted_blocks_total", count, before, to)
        for why, count in every.refused.items():
            metrics.total("ctxreuse_store_refused_puts_total", count, why)

        if every.standing is not None:
            _compete(metrics, every.standing)

    metrics.watch(look)


def _compete(metrics: Metrics, standing: Standing) -> None:
    for name, tokens in {**standing.hits, "real": standing.real}.items():
        metrics.total("ctxreuse_policy_hit_tokens_total", tokens, name)
    for name, weight in standing.weights.items():
        metrics.set("ctxreuse_policy_weight", weight, name)
    for name in standing.hits:
        metrics.set("ctxreuse_policy_leading", name == standing.leader, name)
    metrics.total("ctxreuse_policy_switches_total", standing.switches)
    metrics.total("ctxreuse_policy_asked_tokens_total", standing.asked)
