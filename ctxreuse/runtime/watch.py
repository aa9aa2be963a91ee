"""Figures of the scheduler and of contexts that are kept, in the metrics, read at each scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxreuse.metrics.registry import level_label
from ctxreuse.metrics.table import LEVELS
from ctxreuse.runtime.steps.order import BACKGROUND, INTERACTIVE, NORMAL

if TYPE_CHECKING:
    from ctxreuse.metrics import Metrics
    from ctxreuse.runtime.context_cache import ContextCache
    from ctxreuse.runtime.inflight.memory import MemoryAdmission
    from ctxreuse.runtime.inflight.sharing import PromptsInFlight
    from ctxreuse.runtime.steps.scheduler import StepScheduler

__all__ = ["watch_runtime"]

_NAMES = {INTERACTIVE: "interactive", NORMAL: "normal", BACKGROUND: "background"}


def watch_runtime(
    metrics: Metrics,
    steps: StepScheduler,
    inflight: PromptsInFlight,
    admission: MemoryAdmission | None,
    cache: ContextCache,
) -> None:
    """Feed the rows ``ctxreuse_scheduler_*``, ``ctxreuse_inflight_*`` and ``ctxreuse_resident_*`` at each scrape.

    Several runtimes add up.
    """
    before: dict[tuple[str, ...], float] = {}

    def since(now: float, *row: str) -> float:
        then, before[row] = before.get(row, 0), now
        return now - then

    def add(name: str, total: float, *values: str) -> None:
        metrics.add(name, since(total, name, *values), *values)

    def share(name: str, amount: float, *values: str) -> None:
        metrics.shift(name, since(amount, name, *values), *values)

    def update() -> None:
        now = steps.stats()
        share("ctxreuse_scheduler_waiting_contexts", now.waiting)
        share("ctxreuse_scheduler_admission_requests", admission.waiting if admission is not None else 0)
        kept: dict[str, tuple[int, int]] = dict.fromkeys(LEVELS, (0, 0))
        for level, (contexts, tokens) in cache.levels().items():
            before_contexts, before_tokens = kept[level_label(level)]
            kept[level_label(level)] = before_contexts + contexts, before_tokens + tokens
        for level, (contexts, tokens) in kept.items():
            share("ctxreuse_resident_contexts", contexts, level)
            share("ctxreuse_resident_tokens", tokens, level)
        add("ctxreuse_scheduler_passes_total", now.passes)
        add("ctxreuse_scheduler_pass_contexts_total", now.contexts)
        add("ctxreuse_scheduler_stalled_passes_total", now.stalled)
        for priority, name in _NAMES.items():
            add("ctxreuse_scheduler_started_requests_total", now.started.get(priority, 0), name)
            add("ctxreuse_scheduler_wait_seconds_total", now.waited.get(priority, 0.0), name)
        add("ctxreuse_inflight_followers_total", inflight.followers)
        add("ctxreuse_inflight_tokens_total", inflight.shared_tokens)

    metrics.watch(update)
