"""Commands, flags and metrics of version 0.1.0 are there under their names of then, or have an alias."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from ctxreuse_cloud import node
from ctxreuse_cloud.cli import app as cloud
from ctxreuse_cloud.proxy.backends import Backends
from ctxreuse_cloud.proxy.counts import ProxyCounts
from ctxreuse_cloud.proxy.pauses import PauseTracker
from ctxreuse_edge.cli import app as edge
from prometheus_client import Gauge

from ctxreuse.cli.app import app as core
from ctxreuse.config import BackendConfig
from ctxreuse.metrics import METRICS, Metrics

DATA = Path(__file__).with_name("data") / "names"

NODE_GAUGES = ("ctxreuse_bus_peers", "ctxreuse_workers_up", "ctxreuse_workers_waiting")
#: What was dropped on purpose, with the reason.
DROPPED: dict[str, str] = {}


def words(name: str, command: dict[str, Any]) -> Iterator[str]:
    yield name
    yield from (f"{name} {option}" for option in command["options"])
    for below, one in command.get("commands", {}).items():
        yield from words(f"{name} {below}", one)


def walked(command: Any) -> dict[str, Any]:
    """As the generator of the data walked it; hidden commands and flags count."""
    options = [o for p in command.params if p.param_type_name == "option" for o in p.opts + p.secondary_opts]
    return {"options": options, "commands": {name: walked(c) for name, c in getattr(command, "commands", {}).items()}}


def test_commands_and_flags() -> None:
    known = json.loads((DATA / "cli.json").read_text("utf-8"))
    apps = {"ctxreuse": core, "ctxreuse-edge": edge, "ctxreuse-cloud": cloud}
    assert set(known) == set(apps)
    for name, app in apps.items():
        lacking = set(words(name, known[name])) - set(words(name, walked(typer.main.get_command(app))))
        assert lacking <= set(DROPPED), sorted(lacking)


def test_metrics() -> None:
    """What /metrics shows: each series of then, with its type and labels; new ones and new labels' values may come."""
    metrics = Metrics()
    ProxyCounts(metrics.registry, Backends([BackendConfig(url="http://127.0.0.1:8000", name="vllm")]))
    PauseTracker(metrics.registry)
    for name in NODE_GAUGES:
        Gauge(name, "", registry=metrics.registry)
    now = {line if line[0] == "#" else line.rpartition(" ")[0] for line in metrics.render().decode().splitlines()}
    known = (DATA / "exposition.txt").read_text("utf-8").splitlines()
    assert not set(known) - now - set(DROPPED)


def test_gauges_of_a_cloud() -> None:
    """Those that only a running node has."""
    source = Path(node.__file__).read_text("utf-8")
    assert all(f'"{name}"' in source for name in NODE_GAUGES)


def test_table_of_metrics() -> None:
    """Names, kinds and labels as `METRICS` lists them."""
    now = {metric.name: metric for metric in METRICS}
    for known in json.loads((DATA / "metrics.json").read_text("utf-8")):
        metric = now[known["name"]]
        assert metric.kind == known["kind"]
        labels = {label.name: set(label.values) for label in metric.labels}
        assert labels.keys() == known["labels"].keys(), metric.name
        assert all(set(values) <= labels[name] for name, values in known["labels"].items()), metric.name
