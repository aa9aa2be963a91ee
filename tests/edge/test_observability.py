"""Dashboards and alerts ask for what daemons export: each expression is parsed, each name and label looked up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from ctxreuse_cloud.node import CloudNode
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from ctxreuse.config import BackendConfig, CloudConfig, Settings
from ctxreuse.daemon.page.panels import shown_text

ROOT = Path(__file__).parents[2]
#: What Prometheus itself adds to a scrape.
SCRAPED = {"up": {"job", "instance"}}
FACES = ("edge", "cloud")


def exported(text: str) -> dict[str, dict[str, set[str]]]:
    """The names of all samples of a scrape, their labels and these labels' values."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def selectors(node: Any) -> Iterator[Any]:
    """The vector selectors of an expression, at any depth."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for name in ("vector_selector", "expr", "lhs", "rhs", "args"):
        inner = getattr(node, name, None)
        for one in inner if isinstance(inner, list) else [inner]:
            if one is not None and not isinstance(one, str):
                yield from selectors(one)


def expressions(face: str) -> Iterator[tuple[str, str]]:
    """The expressions of a face's dashboard and alerts, with where they stand."""
    board = json.loads((ROOT / face / "deploy" / "grafana.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "5m").replace("$__range", "1h")
            yield panel["title"], text.replace("$instance", ".*")
    for group in yaml.safe_load((ROOT / face / "deploy" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The metrics of a sidecar with a backend, and of nodes of both kinds as they open."""
    store = str(tmp_path_factory.mktemp("cloud"))
    cloud = CloudConfig(store=store, backends=(BackendConfig(url="http://127.0.0.1:9"),))
    return {"cloud": CloudNode(Settings(cloud=cloud)).metrics.render().decode()}


def test_every_expression_asks_for_what_the_daemon_exports(edge: Any, scrapes: dict[str, str]) -> None:
    edge.http.post("/v1/completions", json={"prompt": "a" * 400, "max_tokens": 3})
    texts = {"edge": edge.http.get("/metrics").text, "cloud": scrapes["cloud"]}
    # Gauges of the sidecar's bus exist once it is open.
    opened = {name: {} for name in ("ctxreuse_bus_peers", "ctxreuse_workers_up", "ctxreuse_workers_waiting")}
    source = (ROOT / "cloud" / "ctxreuse_cloud" / "node.py").read_text()
    assert all(f'"{name}"' in source for name in opened)
    for face in FACES:
        known = exported(texts[face]) | (opened if face == "cloud" else {})
        count = 0
        for where, text in expressions(face):
            for one in selectors(promql_parser.parse(text)):
                count += 1
                assert one.name in known or one.name in SCRAPED, f"{face}: {where}: nothing exports {one.name}"
                labels = known.get(one.name, {})
                for matcher in one.matchers.matchers:
                    if matcher.name in ("instance", "job"):
                        continue
                    assert matcher.name in labels, f"{face}: {where}: {one.name} has no label {matcher.name}"
                    for value in matcher.value.split("|"):
                        assert value in labels[matcher.name], f"{face}: {where}: {matcher.name} is never {value}"
        assert count > 20


def test_dashboards_are_whole() -> None:
    for face in FACES:
        board = json.loads((ROOT / face / "deploy" / "grafana.json").read_text())
        assert board["uid"] == f"ctxreuse-{face}"
        places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in board["panels"]]
        assert len(set(places)) == len(places) == len({one["id"] for one in board["panels"]})
        assert all(one["gridPos"]["x"] + one["gridPos"]["w"] <= 24 for one in board["panels"])
        assert {one["name"] for one in board["templating"]["list"]} == {"datasource", "instance"}


def test_alerts_say_what_to_do() -> None:
    for face in FACES:
        rules = [
            rule
            for group in yaml.safe_load((ROOT / face / "deploy" / "alerts.yml").read_text())["groups"]
            for rule in group["rules"]
        ]
        assert len({rule["alert"] for rule in rules}) == len(rules)
        assert {rule["labels"]["severity"] for rule in rules} <= {"info", "warning", "critical"}
        assert all(rule["annotations"]["summary"] == shown_text(rule["annotations"]["summary"], 200) for rule in rules)


def test_a_scraper_gets_the_format_that_it_asks_for(edge: Any) -> None:
    http = edge.http
    http.post("/v1/completions", json={"prompt": "b" * 400, "max_tokens": 9, "ignore_eos": True})
    plain = http.get("/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    modern = http.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})
    assert modern.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert modern.text.endswith("# EOF\n")
    families = {family.name: family for family in open_families(modern.text)}
    assert families["ctxreuse_inter_token_seconds"].type == "histogram"
    known = exported(plain.text)
    assert not [name for name in known if name.endswith("_created")]
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"} <= known.keys()
    assert known["ctxreuse_build_info"]["version"] == {"0.1.0"}
    values = {
        sample.name: sample.value for family in families.values() for sample in family.samples if not sample.labels
    }
    assert values["ctxreuse_inter_token_seconds_count"] == 8
    assert values["ctxreuse_generation_tokens_per_second_count"] == 1
    assert values["ctxreuse_prefill_tokens_per_second_count"] == 1
