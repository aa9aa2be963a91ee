"""What the proxy counts, in the registry of the node."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ctxreuse_cloud.proxy.backends import Backend, Backends
from ctxreuse_cloud.proxy.stream import Counted

__all__ = ["OUTCOMES", "ProxyCounts"]

#: ``ok``; ``refused`` before a backend was asked; ``upstream``: the backend's own error was passed on; ``failed``: no
#: backend answered; ``broken`` in the middle; ``cancelled`` by the caller; ``stalled``: the caller took nothing.
OUTCOMES = ("ok", "refused", "upstream", "failed", "broken", "cancelled", "stalled")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


def _up(backend: Backend) -> float:
    return float(backend.ready())


def _outstanding(backend: Backend) -> float:
    return float(backend.outstanding)


class ProxyCounts:
    """Counters and histograms; labels are names from the settings, never tenants or what callers write."""

    def __init__(self, registry: CollectorRegistry, backends: Backends) -> None:
        names = [backend.name for backend in backends.all]
        self._requests = Counter(
            "ctxreuse_proxy_requests", "Requests to the proxy that ended.", ["outcome"], registry=registry
        )
        self._tried = Counter("ctxreuse_proxy_attempts", "Requests sent to backends.", ["backend"], registry=registry)
        self._failed = Counter(
            "ctxreuse_proxy_failures", "Requests that a backend did not answer.", ["backend"], registry=registry
        )
        self._retries = Counter("ctxreuse_proxy_retries", "Requests tried once more.", registry=registry)
        self._bytes = Counter("ctxreuse_proxy_answer_bytes", "Bytes of answers passed on.", registry=registry)
        self._tokens = Counter("ctxreuse_proxy_tokens", "Tokens as backends counted them.", ["kind"], registry=registry)
        self._first = Histogram(
            "ctxreuse_proxy_first_byte_seconds", "Time to the first byte.", registry=registry, buckets=_SECONDS
        )
        self._whole = Histogram("ctxreuse_proxy_seconds", "Time to the last byte.", registry=registry, buckets=_SECONDS)
        up = Gauge("ctxreuse_proxy_backend_up", "1 while a backend may be asked.", ["backend"], registry=registry)
        busy = Gauge("ctxreuse_proxy_outstanding", "Requests at a backend now.", ["backend"], registry=registry)
        for backend in backends.all:
            up.labels(backend.name).set_function(partial(_up, backend))
            busy.labels(backend.name).set_function(partial(_outstanding, backend))
        self._start(self._requests, OUTCOMES)
        self._start(self._tried, names)
        self._start(self._failed, names)
        self._start(self._tokens, ("prompt", "cached", "moved", "mended", "completion"))

    @staticmethod
    def _start(counter: Counter, values: Iterable[str]) -> None:
        # A series that exists from the start reads 0 instead of being absent, so that rates and alerts work.
        for value in values:
            counter.labels(value)

    def tried(self, backend: str, *, again: bool) -> None:
        """A request is sent to a backend; ``again``: not for the first time."""
        self._tried.labels(backend).inc()
        if again:
            self._retries.inc()

    def failed(self, backend: str) -> None:
        """A backend did not answer, or broke off."""
        self._failed.labels(backend).inc()

    def passed(self, nbytes: int, usage: Counted | None) -> None:
        """An answer was passed on."""
        self._bytes.inc(nbytes)
        if usage is not None:
            self._tokens.labels("prompt").inc(usage.prompt_tokens)
            self._tokens.labels("cached").inc(usage.cached)
            self._tokens.labels("moved").inc(usage.moved)
            self._tokens.labels("mended").inc(usage.mended)
            self._tokens.labels("completion").inc(usage.completion_tokens)

    def ended(self, outcome: str, first: float | None, whole: float) -> None:
        """A request ended after ``whole`` seconds, its first byte sent after ``first``."""
        self._requests.labels(outcome).inc()
        self._whole.observe(whole)
        if first is not None:
            self._first.observe(first)
