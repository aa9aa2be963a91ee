"""Metrics of the proxy, in the registry of the node."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ctxreuse.pauses.envelope import HINT_OUTCOMES
from ctxreuse_cloud.proxy.backends import TAKES, Backend, Backends, Takes
from ctxreuse_cloud.proxy.kv_events import BackendEvents
from ctxreuse_cloud.proxy.reported import ReportedUsage

__all__ = ["OUTCOMES", "ProxyCounts"]

#: ``refused``: no backend was tried; ``upstream``: the backend's error was passed on; ``failed``: no backend
#: answered; ``broken``: the answer ended early; ``cancelled``: by the caller; ``stalled``: the caller did not read;
#: ``revoked``: its key ended.
OUTCOMES = ("ok", "refused", "upstream", "failed", "broken", "cancelled", "stalled", "revoked")

#: Kinds of tokens, and their names in version 0.1.0, which are counted for one version, too.
_OLD = {"relocated": "moved", "recomputed": "mended"}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


def _up(backend: Backend) -> float:
    return float(backend.ready())


def _outstanding(backend: Backend) -> float:
    return float(backend.outstanding)


def _takes(backend: Backend, takes: Takes) -> float:
    return float(backend.takes == takes)


def _source(backend: Backend, source: str) -> float:
    return float(backend.source == source)


def _blocks(events: BackendEvents) -> float:
    return float(events.blocks)


def _lost(events: BackendEvents) -> float:
    return float(events.lost)


def _values(counter: Counter, label: str) -> dict[str, int]:
    samples = (one for family in counter.collect() for one in family.samples if one.name.endswith("_total"))
    return {one.labels[label]: int(one.value) for one in samples}


class ProxyCounts:
    """Counters and histograms; labels are names from the settings, never tenants or text of callers."""

    def __init__(self, registry: CollectorRegistry, backends: Backends) -> None:
        names = [backend.name for backend in backends.all]
        self._requests = Counter(
            "ctxreuse_proxy_requests", "Requests to the proxy that ended.", ["outcome"], registry=registry
        )
        tried = Counter("ctxreuse_proxy_attempts", "Requests sent to backends.", ["backend"], registry=registry)
        failed = Counter("ctxreuse_proxy_failures", "Attempts that failed.", ["backend"], registry=registry)
        self._retries = Counter("ctxreuse_proxy_retries", "Attempts after the first of a request.", registry=registry)
        self._bytes = Counter("ctxreuse_proxy_answer_bytes", "Bytes of answers passed on.", registry=registry)
        self._tokens = Counter("ctxreuse_proxy_tokens", "Tokens as reported by backends.", ["kind"], registry=registry)
        self._first = Histogram(
            "ctxreuse_proxy_first_byte_seconds", "Time to the first byte.", registry=registry, buckets=_SECONDS
        )
        self._whole = Histogram("ctxreuse_proxy_seconds", "Time to the last byte.", registry=registry, buckets=_SECONDS)
        up = Gauge("ctxreuse_proxy_backend_up", "1 while a backend takes requests.", ["backend"], registry=registry)
        busy = Gauge("ctxreuse_proxy_outstanding", "Requests running at a backend.", ["backend"], registry=registry)
        takes = Gauge(
            "ctxreuse_proxy_backend_takes",
            "1 for what a backend is sent: all, only sessions that it has, nothing.",
            ["backend", "takes"],
            registry=registry,
        )
        source = Gauge(
            "ctxreuse_router_source",
            "1 for that by which it is known what a backend has: events, text it was sent, both.",
            ["backend", "source"],
            registry=registry,
        )
        blocks = Gauge(
            "ctxreuse_router_blocks", "Blocks that a backend has by its KV events.", ["backend"], registry=registry
        )
        lost = Gauge(
            "ctxreuse_router_lost_batches",
            "Batches of KV events of a backend that did not come, since the start.",
            ["backend"],
            registry=registry,
        )
        for backend in backends.all:
            up.labels(backend.name).set_function(partial(_up, backend))
            busy.labels(backend.name).set_function(partial(_outstanding, backend))
            for kind in TAKES:
                takes.labels(backend.name, kind).set_function(partial(_takes, backend, kind))
            for name in ("events", "both", "text"):
                source.labels(backend.name, name).set_function(partial(_source, backend, name))
            if backend.events is not None:
                blocks.labels(backend.name).set_function(partial(_blocks, backend.events))
                lost.labels(backend.name).set_function(partial(_lost, backend.events))
        hints = Counter(
            "ctxreuse_proxy_kv_hints",
            "Actions of callers' KV hints: passed on (accepted), or ignored and why; made here.",
            ["outcome"],
            registry=registry,
        )
        self._hints = self._start(hints, (*HINT_OUTCOMES, "made"))
        self._outcome = self._start(self._requests, OUTCOMES)
        self._tried = self._start(tried, names)
        self._failed = self._start(failed, names)
        self._kind = self._start(self._tokens, (*ReportedUsage().counts(), *_OLD.values()))

    @staticmethod
    def _start(counter: Counter, values: Iterable[str]) -> dict[str, Counter]:
        # A series must read 0 from the start, not be absent, for rates and alerts to work. Looking one up takes longer
        # than counting in it.
        return {value: counter.labels(value) for value in values}

    def totals(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return tokens by kind, and requests that ended by outcome."""
        return _values(self._tokens, "kind"), _values(self._requests, "outcome")

    def tried(self, backend: str, *, again: bool) -> None:
        """Count an attempt; ``again``: not the first of its request."""
        self._tried[backend].inc()
        if again:
            self._retries.inc()

    def hinted(self, outcomes: Iterable[str], *, made: bool) -> None:
        """Count a request's KV hints, and whether one was ``made`` here."""
        for outcome in (*outcomes, *(["made"] if made else [])):
            self._hints[outcome].inc()

    def failed(self, backend: str) -> None:
        """Count a backend that did not answer, or broke off."""
        self._failed[backend].inc()

    def passed(self, nbytes: int, usage: ReportedUsage | None) -> None:
        """Count an answer that was passed on."""
        self._bytes.inc(nbytes)
        if usage is not None:
            for kind, tokens in usage.counts().items():
                if tokens:
                    self._kind[kind].inc(tokens)
                    if kind in _OLD:
                        self._kind[_OLD[kind]].inc(tokens)

    def ended(self, outcome: str, first: float | None, whole: float) -> None:
        """Count a request that ended after ``whole`` seconds, with its first byte after ``first``."""
        self._outcome[outcome].inc()
        self._whole.observe(whole)
        if first is not None:
            self._first.observe(first)
