"""Metrics of API keys, by name."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from ctxreuse.daemon.keys import Keys

__all__ = ["KeyMetrics"]

_SERIES = (
    ("ctxreuse_key_requests", "Requests that began, by the name of their API key."),
    ("ctxreuse_key_limited_requests", "Requests refused by the limits a minute of their API key."),
    ("ctxreuse_key_tokens", "Tokens computed of prompts and generated, by the name of the API key."),
)


class KeyMetrics(Collector):
    """Exports what keys used; only while metrics ask for a key themselves, as names of keys are not for all."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def collect(self) -> Iterator[CounterMetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        used = self._keys.used() if self._keys.guard("metrics") else {}
        for number, (name, about) in enumerate(_SERIES):
            family = CounterMetricFamily(name, about, labels=["key"])
            for key, counts in used.items():
                family.add_metric([key], counts[number])
            yield family
