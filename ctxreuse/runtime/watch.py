"""The scheduler's figures in the metrics, read at each scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxreuse.runtime.steps.order import BACKGROUND, INTERACTIVE, NORMAL

if TYPE_CHECKING:
    from ctxreuse.metrics import Metrics
    from ctxreuse.runtime.inflight.memory import MemoryAdmission
    from ctxreuse.runtime.inflight.sharing import PromptsInFlight
    from ctxreuse.runtime.steps.scheduler import StepScheduler

__all__ = ["watch_steps"]

_NAMES = {INTERACTIVE: "interactive", NORMAL: "normal", BACKGROUND: "background"}


def watch_steps(
    metrics: Metrics, steps: StepScheduler, inflight: PromptsInFlight, admission: MemoryAdmission | None
) -> None:
    """Feed the ``ctxreuse_scheduler_*`` and ``ctxreuse_inflight_*`` rows at each scrape; several runtimes add up."""
    before: dict[tuple[str, ...], float] = {}

    def add(name: str, total: float, *values: str) -> None:
        metrics.add(name, total - before.get((name, *values), 0), *values)
        before[name, *values] = total

    def update() -> None:
        now = steps.stats()
        metrics.set("ctxreuse_scheduler_waiting_contexts", now.waiting)
        metrics.set("ctxreuse_scheduler_admission_requests", admission.waiting if admission is not None else 0)
        add("ctxreuse_scheduler_passes_total", now.passes)
        add("ctxreuse_scheduler_pass_contexts_total", now.contexts)
        add("ctxreuse_scheduler_stalled_passes_total", now.stalled)
        for priority, name in _NAMES.items():
            add("ctxreuse_scheduler_started_requests_total", now.started.get(priority, 0), name)
            add("ctxreuse_scheduler_wait_seconds_total", now.waited.get(priority, 0.0), name)
        add("ctxreuse_inflight_followers_total", inflight.followers)
        add("ctxreuse_inflight_tokens_total", inflight.shared_tokens)

    metrics.watch(update)
