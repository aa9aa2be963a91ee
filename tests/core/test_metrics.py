"""Metrics: named by one table, bounded in labels, in a registry that nobody else shares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from ctxreuse.metrics import METRICS, SOURCES, Metrics, watch_store
from ctxreuse.store import BlockStore, open_store
from ctxreuse.testing.store_levels import CodedContext, codec
from ctxreuse.usage import TokenUsage, Usage, UsageSeconds


def test_the_table_keeps_its_rules() -> None:
    for row in METRICS:
        assert re.fullmatch(r"ctxreuse_[a-z_]+", row.name)
        assert row.name.endswith("_total") == (row.kind == "counter")
        assert row.name.removesuffix("_total").endswith(
            (
                "_tokens",
                "_bytes",
                "_seconds",
                "_second",
                "requests",
                "misses",
                "_puts",
                "_blocks",
                "_links",
                "_reconnects",
                "_passes",
                "_steps",
                "_hints",
                "_followers",
                "_prefills",
                "_resumes",
                "_refused",
                "_quarantined",
                "_decisions",
                "_cards",
                "_profiles",
                "_leading",
                "_failing",
                "_contexts",
                "_returns",
                "_switches",
                "_weight",
                "_answers",
                "_contexts",
                "_returns",
            )
        )
        assert row.help.endswith(".")
        for label in row.labels:
            assert re.fullmatch("[a-z]+", label.name)
            assert 2 <= len(set(label.values)) <= 32
    assert len({row.name for row in METRICS}) == len(METRICS)


def test_tokens_are_weighed_by_source() -> None:
    metrics = Metrics()
    usage = Usage(TokenUsage(100, 70, 7, {"disk": 60, "host": 10}), UsageSeconds(0.5, 0.0, 1.5), "absent")
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
    with pytest.raises(KeyError):
        metrics.add("ctxreuse_requests_total", 1)
    with pytest.raises(KeyError):
        metrics.add("ctxreuse_completion_tokens_total", 1, "stop")
    with pytest.raises(TypeError):
        metrics.add("ctxreuse_store_bytes", 1, "disk")
    with pytest.raises(TypeError):
        metrics.set("ctxreuse_requests_total", 1, "stop")
    with pytest.raises(TypeError):
        metrics.shift("ctxreuse_requests_total", 1, "stop")
    with pytest.raises(TypeError):
        metrics.observe("ctxreuse_store_blocks", 1, "disk")


def test_two_labels_are_bounded_each_for_itself() -> None:
    metrics = Metrics()
    metrics.add("ctxreuse_http_requests_total", 1, "chat", "2xx")
    metrics.add("ctxreuse_http_requests_total", 1, "/made/up", "2xx")
    metrics.add("ctxreuse_http_requests_total", 1, "chat", "999")
    assert metrics.read("ctxreuse_http_requests_total", "chat", "2xx") == 1
    assert metrics.read("ctxreuse_http_requests_total", "other", "2xx") == 1
    assert metrics.read("ctxreuse_http_requests_total", "chat", "other") == 1


def test_a_total_counted_elsewhere_goes_up_only() -> None:
    metrics = Metrics()
    for total in (5, 5, 9, 2):  # then the other one began anew
        metrics.total("ctxreuse_link_bytes_total", total, "in")
    assert metrics.read("ctxreuse_link_bytes_total", "in") == 11
    assert metrics.read("ctxreuse_link_bytes_total", "out") == 0


def test_a_store_is_looked_at_when_somebody_asks(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", capacity=1 << 20, host_bytes=4096) as store:
        metrics = Metrics()
        assert store.disk is not None
        watch_store(metrics, store.stats, store.disk.stats, lambda: 77)
        assert not store.put(b"k" * 32, b"nonsense")
        metrics.render()
        assert metrics.read("ctxreuse_store_capacity_bytes", "disk") == 1 << 20
        assert metrics.read("ctxreuse_store_capacity_bytes", "host") == 4096
        assert metrics.read("ctxreuse_store_bytes", "device") == 77
        assert metrics.read("ctxreuse_store_refused_puts_total", "malformed") == 1
        metrics.render()
        assert metrics.read("ctxreuse_store_refused_puts_total", "malformed") == 1


def test_a_store_that_fails_hides_nothing_else() -> None:
    def broken() -> None:
        raise OSError("the disk is gone")

    metrics = Metrics()
    metrics.watch(broken)
    assert b"ctxreuse_requests_total" in metrics.render()


def test_levels_are_counted_by_what_they_are(tmp_path: Path) -> None:
    contexts = [CodedContext(4, seed=seed) for seed in range(6)]
    metrics = Metrics()
    with BlockStore.open(tmp_path, capacity=300_000) as store:
        store.register_codec(codec())
        watch_store(metrics, store.stats, store.stats)
        for context in contexts:
            for i, key in enumerate(context.keys):
                store.put(key, context.block(i), max_kl=0.05)
            store.flush()
        metrics.render()
        blocks = {level: metrics.read("ctxreuse_store_level_blocks", level) for level in ("exact", "packed", "lossy")}
        held = store.stats().levels
        assert blocks == {"exact": held.get("exact", 0), "packed": held["exact+rans"], "lossy": held["kl-0.05"]}
        steps = [("exact", "packed"), ("exact", "lossy"), ("packed", "lossy")]
        counted = sum(metrics.read("ctxreuse_store_recompressed_blocks_total", *step) for step in steps)
        assert counted == sum(store.stats().recompressed.values()) > 0
    usage = Usage(TokenUsage(100, 90, 0, {"disk": 90}, {"exact": 10, "kl-0.05": 60, "approx": 20}))
    metrics.record(usage, "stop")
    assert metrics.read("ctxreuse_reused_tokens_total", "lossy") == 60
    assert metrics.read("ctxreuse_reused_tokens_total", "approx") == 20


def test_renamed_metrics_keep_their_old_name() -> None:
    metrics = Metrics()
    metrics.add("ctxreuse_received_rejected_blocks_total", 3, "corrupt")
    metrics.add("ctxreuse_relocated_tokens_total", 5)
    old = metrics.registry.get_sample_value
    assert old("ctxreuse_given_refused_blocks_total", {"reason": "corrupt"}) == 3
    assert old("ctxreuse_moved_tokens_total") == 5
    with pytest.raises(KeyError):
        metrics.add("ctxreuse_moved_tokens_total", 1)
