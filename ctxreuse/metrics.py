"""Metrics: one table of names, and counters that follow it, in a registry of their own.

Names start with ``ctxreuse_``, units are base units (seconds, bytes, tokens). A label takes only the values that the
table lists; any other becomes ``other``, so that no request can grow the number of series.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["METRICS", "SOURCES", "Metric", "Metrics", "Spent"]

#: Where a prompt's tokens came from, nearest first; ``compute`` means that they were prefilled.
SOURCES = ("device", "host", "disk", "edge", "cloud", "compute")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metric(NamedTuple):
    """One row: ``kind`` is counter, gauge or histogram; ``values`` are what its one ``label`` may say."""

    name: str
    kind: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()


# The words that a store counts with: see StoreStats.
_MISSES = (
    "absent",
    "corrupt",
    "truncated",
    "foreign",
    "older",
    "newer",
    "space",
    "tokens",
    "unreadable",
    "no store",
)
_REFUSALS = ("queue_full", "orphan", "too_big", "no_room", "malformed", "disk", "backoff", "readonly", "closed")

_TIERS = ("device", "host", "disk")

METRICS = (
    Metric(
        "ctxreuse_requests_total",
        "counter",
        "Requests that finished.",
        "finish",
        ("stop", "length", "stop_string", "cancelled", "error"),
    ),
    Metric("ctxreuse_prompt_tokens_total", "counter", "Prompt tokens by where their KV came from.", "source", SOURCES),
    Metric("ctxreuse_completion_tokens_total", "counter", "Tokens generated."),
    Metric("ctxreuse_misses_total", "counter", "Requests whose reuse ended early, by reason.", "reason", _MISSES),
    Metric("ctxreuse_load_seconds", "histogram", "Time to bring reused KV into the engine."),
    Metric("ctxreuse_prefill_seconds", "histogram", "Time to compute the rest of the prompt."),
    Metric("ctxreuse_store_bytes", "gauge", "Bytes of KV held, by tier.", "tier", _TIERS),
    Metric("ctxreuse_store_capacity_bytes", "gauge", "Bytes of KV allowed, by tier.", "tier", _TIERS),
    Metric("ctxreuse_store_blocks", "gauge", "Blocks held, by tier.", "tier", _TIERS),
    Metric("ctxreuse_store_evicted_bytes_total", "counter", "Bytes evicted to make room."),
    Metric("ctxreuse_store_refused_puts_total", "counter", "Blocks offered and not kept.", "reason", _REFUSALS),
    Metric("ctxreuse_store_corrupt_blocks_total", "counter", "Blocks dropped because a check failed."),
)


class Spent(Protocol):
    """What ``record`` reads of a request's usage."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def by_source(self) -> dict[str, int]: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def missed(self) -> str: ...
    @property
    def seconds_load(self) -> float: ...
    @property
    def seconds_prefill(self) -> float: ...


class Metrics:
    """All of METRICS in one registry. Any thread may call; each call takes about a microsecond.

    Unknown names raise KeyError: they are slips in code, not in data.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._rows = {row.name: row for row in METRICS}
        self._series: dict[str, Counter | Gauge | Histogram] = {}
        for row in METRICS:
            labels = (row.label,) if row.label else ()
            if row.kind == "histogram":
                self._series[row.name] = Histogram(row.name, row.help, labels, registry=self.registry, buckets=_SECONDS)
            else:
                kind = Counter if row.kind == "counter" else Gauge
                self._series[row.name] = kind(row.name, row.help, labels, registry=self.registry)
            for value in row.values:
                # A series that exists from the start reads 0 instead of being absent, so that rates and alerts work.
                self._child(row.name, value)

    def _child(self, name: str, value: str) -> Counter | Gauge | Histogram:
        row, series = self._rows[name], self._series[name]
        if not row.label:
            return series
        return series.labels(value if value in row.values else "other")

    def add(self, name: str, amount: float = 1, value: str = "") -> None:
        """Add to a counter; ``value`` is its label's value. Raises TypeError if it is not a counter."""
        child = self._child(name, value)
        if not isinstance(child, Counter):
            raise TypeError(f"{name} is not a counter")
        child.inc(amount)

    def set(self, name: str, amount: float, value: str = "") -> None:
        """Set a gauge. Raises TypeError if it is not a gauge."""
        child = self._child(name, value)
        if not isinstance(child, Gauge):
            raise TypeError(f"{name} is not a gauge")
        child.set(amount)

    def observe(self, name: str, amount: float) -> None:
        """Add one observation to a histogram. Raises TypeError if it is not a histogram."""
        child = self._child(name, "")
        if not isinstance(child, Histogram):
            raise TypeError(f"{name} is not a histogram")
        child.observe(amount)

    def record(self, usage: Spent, finish: str) -> None:
        """Count one finished request: its tokens by source, its time, and why its reuse ended."""
        self.add("ctxreuse_requests_total", 1, finish)
        for source, tokens in usage.by_source.items():
            self.add("ctxreuse_prompt_tokens_total", tokens, source)
        self.add("ctxreuse_prompt_tokens_total", usage.prompt_tokens - usage.cached_tokens, "compute")
        self.add("ctxreuse_completion_tokens_total", usage.completion_tokens)
        if usage.missed:
            self.add("ctxreuse_misses_total", 1, usage.missed)
        self.observe("ctxreuse_load_seconds", usage.seconds_load)
        self.observe("ctxreuse_prefill_seconds", usage.seconds_prefill)

    def read(self, name: str, value: str = "") -> float:
        """The present value of a counter or gauge, or the sum of a histogram. For tests and ``doctor``."""
        row = self._rows[name]
        kept = {row.label: value if value in row.values else "other"} if row.label else {}
        found = self.registry.get_sample_value(f"{name}_sum" if row.kind == "histogram" else name, kept)
        return 0.0 if found is None else found

    def render(self) -> bytes:
        """Everything in the text format that Prometheus scrapes."""
        return generate_latest(self.registry)
