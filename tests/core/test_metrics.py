"""Metrics: named by one table, bounded in labels, in a registry that nobody else shares."""

from __future__ import annotations

import re

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from ctxreuse.metrics import METRICS, SOURCES, Metrics
from ctxreuse.runtime.usage import Usage


def test_the_table_keeps_its_rules() -> None:
    for row in METRICS:
        assert re.fullmatch(r"ctxreuse_[a-z_]+", row.name)
        assert row.name.endswith("_total") == (row.kind == "counter")
        assert row.name.removesuffix("_total").endswith(
            ("_tokens", "_bytes", "_seconds", "requests", "misses", "_puts", "_blocks")
        )
        assert row.help.endswith(".")
        assert bool(row.label) == bool(row.values)
        assert len(row.values) <= 10
    assert len({row.name for row in METRICS}) == len(METRICS)


def test_tokens_are_weighed_by_source() -> None:
    metrics = Metrics()
    usage = Usage(100, 70, {"disk": 60, "host": 10}, "absent", 0.5, 1.5, completion_tokens=7)
    metrics.record(usage, "stop")
    metrics.record(usage, "stop")
    by_source = {source: metrics.read("ctxreuse_prompt_tokens_total", source) for source in SOURCES}
    assert by_source == {"device": 0, "host": 20, "disk": 120, "edge": 0, "cloud": 0, "compute": 60}
    assert sum(by_source.values()) == 2 * usage.prompt_tokens
    assert metrics.read("ctxreuse_requests_total", "stop") == 2
    assert metrics.read("ctxreuse_completion_tokens_total") == 14
    assert metrics.read("ctxreuse_misses_total", "absent") == 2
    assert metrics.read("ctxreuse_load_seconds") == 1.0
    assert metrics.read("ctxreuse_prefill_seconds") == 3.0


def test_labels_are_bounded() -> None:
    metrics = Metrics()
    before = len(metrics.render().splitlines())
    for i in range(100):
        metrics.add("ctxreuse_misses_total", 1, f"made up {i}")
    assert metrics.read("ctxreuse_misses_total", "whatever") == 100
    assert len(metrics.render().splitlines()) <= before + 2


def test_rendered_text_parses_and_every_row_is_there() -> None:
    metrics = Metrics()
    metrics.set("ctxreuse_store_bytes", 5, "disk")
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    assert {row.name.removesuffix("_total") for row in METRICS} <= set(families)
    values = {sample.labels["tier"]: sample.value for sample in families["ctxreuse_store_bytes"].samples}
    assert values == {"device": 0, "host": 0, "disk": 5}


def test_registries_are_apart() -> None:
    one, other = Metrics(), Metrics()
    one.add("ctxreuse_completion_tokens_total", 3)
    assert other.read("ctxreuse_completion_tokens_total") == 0
    assert not any(family.name.startswith("ctxreuse") for family in REGISTRY.collect())


def test_slips_in_code_are_loud() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.add("ctxreuse_made_up_total")
    with pytest.raises(TypeError):
        metrics.add("ctxreuse_store_bytes")
    with pytest.raises(TypeError):
        metrics.set("ctxreuse_requests_total", 1, "stop")
    with pytest.raises(TypeError):
        metrics.observe("ctxreuse_store_blocks", 1)
