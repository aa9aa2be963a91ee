"""Counters that follow the table, in a registry of their own.

A label takes only the values that the table lists; any other becomes ``other``, so that no request can grow the number
of series.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ctxreuse.levels import EXACT, PACKED
from ctxreuse.metrics.table import METRICS

__all__ = ["Metrics", "Spent", "how_kept"]

log = logging.getLogger(__name__)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def how_kept(level: str) -> str:
    """The value of a ``level`` label for a level's name: there are few, whatever cards there are."""
    if level == PACKED:
        return "packed"
    return level if level == EXACT else "approx" if level.startswith("approx") else "lossy"


class Spent(Protocol):
    """What ``record`` reads of a request's usage."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def by_source(self) -> dict[str, int]: ...
    @property
    def by_level(self) -> dict[str, int]: ...
    @property
    def approx(self) -> bool: ...
    @property
    def moved(self) -> int: ...
    @property
    def mended(self) -> int: ...
    @property
    def gate(self) -> str: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def missed(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def seconds_load(self) -> float: ...
    @property
    def seconds_prefill(self) -> float: ...


class Metrics:
    """All of METRICS in one registry. Any thread may call; each call takes about a microsecond.

    Unknown names and a wrong number of label values raise KeyError: they are slips in code, not in data.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._rows = {row.name: row for row in METRICS}
        self._series: dict[str, Counter | Gauge | Histogram] = {}
        self._totals: dict[tuple[str, ...], float] = {}
        self._watchers: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        for row in METRICS:
            labels = [label.name for label in row.labels]
            if row.kind == "histogram":
                self._series[row.name] = Histogram(row.name, row.help, labels, registry=self.registry, buckets=_SECONDS)
            else:
                kind = Counter if row.kind == "counter" else Gauge
                self._series[row.name] = kind(row.name, row.help, labels, registry=self.registry)
            for values in itertools.product(*(label.values for label in row.labels)):
                # A series that exists from the start reads 0 instead of being absent, so that rates and alerts work.
                self._child(row.name, values)

    def _child(self, name: str, values: tuple[str, ...]) -> Counter | Gauge | Histogram:
        series, known = self._series[name], self._known(name, values)
        return series.labels(*known) if known else series

    def _known(self, name: str, values: tuple[str, ...]) -> tuple[str, ...]:
        labels = self._rows[name].labels
        if len(values) != len(labels):
            raise KeyError(f"{name} takes {len(labels)} label values, not {len(values)}")
        return tuple(value if value in label.values else "other" for value, label in zip(values, labels))

    def add(self, name: str, amount: float = 1, *values: str) -> None:
        """Add to a counter; ``values`` are those of its labels. Raises TypeError if it is not a counter."""
        child = self._child(name, values)
        if not isinstance(child, Counter):
            raise TypeError(f"{name} is not a counter")
        child.inc(amount)

    def total(self, name: str, total: float, *values: str) -> None:
        """Bring a counter up to a total that something else counts; a smaller one than before is a new beginning."""
        at = (name, *self._known(name, values))
        with self._lock:
            before = self._totals.get(at, 0.0)
            self._totals[at] = total
            self.add(name, total - before if total >= before else total, *values)

    def set(self, name: str, amount: float, *values: str) -> None:
        """Set a gauge. Raises TypeError if it is not a gauge."""
        child = self._child(name, values)
        if not isinstance(child, Gauge):
            raise TypeError(f"{name} is not a gauge")
        child.set(amount)

    def observe(self, name: str, amount: float, *values: str) -> None:
        """Add one observation to a histogram. Raises TypeError if it is not a histogram."""
        child = self._child(name, values)
        if not isinstance(child, Histogram):
            raise TypeError(f"{name} is not a histogram")
        child.observe(amount)

    def record(self, usage: Spent, finish: str) -> None:
        """Count one finished request: its tokens by source, its time, and why its reuse ended."""
        self.add("ctxreuse_requests_total", 1, finish)
        for source, tokens in usage.by_source.items():
            self.add("ctxreuse_prompt_tokens_total", tokens, source)
        self.add("ctxreuse_prompt_tokens_total", usage.prompt_tokens - usage.cached_tokens, "compute")
        for level, tokens in usage.by_level.items():
            self.add("ctxreuse_reused_tokens_total", tokens, how_kept(level))
        self.add("ctxreuse_moved_tokens_total", usage.moved)
        self.add("ctxreuse_mended_tokens_total", usage.mended)
        self.add("ctxreuse_completion_tokens_total", usage.completion_tokens)
        if usage.why or usage.missed:
            self.add("ctxreuse_misses_total", 1, usage.why or usage.missed)
        self.observe("ctxreuse_load_seconds", usage.seconds_load)
        self.observe("ctxreuse_prefill_seconds", usage.seconds_prefill)

    def watch(self, look: Callable[[], None]) -> None:
        """Call ``look`` before each `render`: it sets what is known elsewhere, such as a store's figures."""
        self._watchers.append(look)

    def read(self, name: str, *values: str) -> float:
        """The present value of a counter or gauge, or the sum of a histogram. For tests, ``status`` and ``doctor``."""
        row = self._rows[name]
        labels = {label.name: value for label, value in zip(row.labels, self._known(name, values))}
        found = self.registry.get_sample_value(f"{name}_sum" if row.kind == "histogram" else name, labels)
        return 0.0 if found is None else found

    def render(self) -> bytes:
        """Everything in the text format that Prometheus scrapes."""
        for look in self._watchers:
            try:
                look()
            except Exception:
                # A store that fails must not hide the figures that would show it.
                log.warning("a figure could not be read", exc_info=True)
        return generate_latest(self.registry)
