"""Metrics: one ``table`` of names, the ``registry`` that counts by it, and what is looked up at scrape time."""

from ctxreuse.metrics.registry import Metrics
from ctxreuse.metrics.store import watch_store
from ctxreuse.metrics.table import METRICS, ROUTES, SOURCES, Metric

__all__ = ["METRICS", "ROUTES", "SOURCES", "Metric", "Metrics", "watch_store"]
