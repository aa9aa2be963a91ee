"""Counters, gauges and histograms of the table, in a Prometheus registry of their own.

A label value that the table does not list is counted as ``other``, so no request can add a series.
"""

from __future__ import annotations

import itertools
import logging
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from ctxreuse.block.levels import EXACT, PACKED
from ctxreuse.kernels.dispatch import native as _native
from ctxreuse.metrics.table import METRICS, RENAMED
from ctxreuse.usage import Usage

__all__ = ["Metrics", "level_label"]

log = logging.getLogger(__name__)


def level_label(level: str) -> str:
    """Return the ``level`` label (exact, packed, lossy or approx) of a level's name."""
    if level == PACKED:
        return "packed"
    return level if level == EXACT else "approx" if level.startswith("approx") else "lossy"


class _OldNames:
    """Collector that exports renamed series under their old names, too."""

    def __init__(self, series: dict[str, Counter | Gauge | Histogram]) -> None:
        self._series = [(series[new], new, old) for new, old in RENAMED.items()]

    def collect(self) -> Iterator[Family]:
        for series, new, old in self._series:
            for family in series.collect():
                copy = Family(old.removesuffix("_total"), f"Deprecated: see {new}.", family.type)
                base, renamed = new.removesuffix("_total"), copy.name
                copy.samples = [s._replace(name=s.name.replace(base, renamed, 1)) for s in family.samples]
                yield copy


class _WithoutCreated(CollectorRegistry):
    """The same families without the times at which series were made: as many samples again, which say nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._whole = registry

    def collect(self) -> Iterable[Family]:
        for family in self._whole.collect():
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family


class Metrics:
    """All of METRICS in one registry, with those of the process. Thread-safe; a call takes about a microsecond.

    Raises KeyError for an unknown name or a wrong number of label values.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        old = set(RENAMED.values())
        self._rows = {row.name: row for row in METRICS if row.name not in old}
        self._series: dict[str, Counter | Gauge | Histogram] = {}
        self._totals: dict[tuple[str, ...], float] = {}
        self._watchers: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        for row in self._rows.values():
            labels = [label.name for label in row.labels]
            if row.kind == "histogram":
                self._series[row.name] = Histogram(
                    row.name, row.help, labels, registry=self.registry, buckets=row.buckets
                )
            else:
                kind = Counter if row.kind == "counter" else Gauge
                self._series[row.name] = kind(row.name, row.help, labels, registry=self.registry)
            for values in itertools.product(*(label.values for label in row.labels)):
                # A series must read 0 from the start, not be absent, for rates and alerts to work.
                self._child(row.name, values)
        self.registry.register(_OldNames(self._series))
        ProcessCollector(registry=self.registry)
        self.watch(self._heap)
        about = {"version": version("ctxreuse"), "python": platform.python_version()}
        build = Gauge("ctxreuse_build_info", "1, with what this daemon is.", list(about), registry=self.registry)
        build.labels(**about).set(1)

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
        """Set a counter to a total counted elsewhere; a smaller total than before means that the count was reset."""
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

    def shift(self, name: str, amount: float, *values: str) -> None:
        """Add to a gauge that is a sum over several parts of the process. Raises TypeError if it is not a gauge."""
        child = self._child(name, values)
        if not isinstance(child, Gauge):
            raise TypeError(f"{name} is not a gauge")
        child.inc(amount)

    def observe(self, name: str, amount: float, *values: str) -> None:
        """Add one observation to a histogram. Raises TypeError if it is not a histogram."""
        child = self._child(name, values)
        if not isinstance(child, Histogram):
            raise TypeError(f"{name} is not a histogram")
        child.observe(amount)

    def record(self, usage: Usage, finish: str, spared: float | None = None) -> None:
        """Count one finished request: tokens by source, seconds, and the reason of its first miss.

        ``spared``: predicted seconds of computing what it reused, if known.
        """
        self.add("ctxreuse_requests_total", 1, finish)
        for source, tokens in usage.tokens.by_source.items():
            self.add("ctxreuse_prompt_tokens_total", tokens, source)
        self.add("ctxreuse_prompt_tokens_total", usage.tokens.computed, "compute")
        for level, tokens in usage.tokens.by_level.items():
            self.add("ctxreuse_reused_tokens_total", tokens, level_label(level))
        self.add("ctxreuse_relocated_tokens_total", usage.tokens.relocated)
        self.add("ctxreuse_recomputed_tokens_total", usage.tokens.recomputed)
        self.add("ctxreuse_completion_tokens_total", usage.tokens.completion)
        self.add("ctxreuse_draft_tokens_total", usage.tokens.accepted, "accepted")
        self.add("ctxreuse_draft_tokens_total", usage.tokens.drafted - usage.tokens.accepted, "rejected")
        by_model = usage.tokens.drafted_by_model, usage.tokens.accepted_by_model
        self.add("ctxreuse_model_draft_tokens_total", by_model[1], "accepted")
        self.add("ctxreuse_model_draft_tokens_total", by_model[0] - by_model[1], "rejected")
        self.add("ctxreuse_verified_tokens_total", usage.tokens.verified)
        if usage.why or usage.miss_reason:
            self.add("ctxreuse_misses_total", 1, usage.why or usage.miss_reason)
        self.observe("ctxreuse_load_seconds", usage.seconds.load)
        self.observe("ctxreuse_prefill_seconds", usage.seconds.compute)
        if usage.tokens.computed and usage.seconds.compute > 0:
            self.observe("ctxreuse_prefill_tokens_per_second", usage.tokens.computed / usage.seconds.compute)
        if spared is not None and usage.tokens.cached:
            saved = spared - usage.seconds.load - usage.seconds.fetch
            self.add("ctxreuse_reuse_seconds_total", abs(saved), "saved" if saved >= 0 else "lost")

    def watch(self, update: Callable[[], None]) -> None:
        """Call ``update`` before each `render`, to set figures that are counted elsewhere."""
        self._watchers.append(update)

    def _heap(self) -> None:
        for state, nbytes in zip(("used", "kept"), _native.heap_bytes()):
            self.set("ctxreuse_heap_bytes", nbytes, state)
        self.set("ctxreuse_python_blocks", sys.getallocatedblocks())

    def read(self, name: str, *values: str) -> float:
        """Return the value of a counter or gauge, or the sum of a histogram."""
        row = self._rows[name]
        wanted = f"{name}_sum" if row.kind == "histogram" else name
        return next((one.value for one in self._samples(name, values) if one.name == wanted), 0.0)

    def buckets(self, name: str, *values: str) -> list[tuple[float, int]]:
        """Return the upper limits of a histogram's buckets, and how many observations were at most that."""
        found = (one for one in self._samples(name, values) if one.name.endswith("_bucket"))
        return [(float(one.labels["le"]), int(one.value)) for one in found]

    def _samples(self, name: str, values: tuple[str, ...]) -> Iterator[Sample]:
        labels = {label.name: value for label, value in zip(self._rows[name].labels, self._known(name, values))}
        for family in self._series[name].collect():
            yield from (one for one in family.samples if labels.items() <= one.labels.items())

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return self.exposition("")[0]

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in the format that an ``Accept`` header prefers, OpenMetrics' or Prometheus' text format,
        and its content type."""
        for update in self._watchers:
            try:
                update()
            except Exception:  # a failing store must not hide the figures that would show it
                log.warning("metrics could not be updated", exc_info=True)
        encode, media = choose_encoder(accept)
        return encode(_WithoutCreated(self.registry)), media
