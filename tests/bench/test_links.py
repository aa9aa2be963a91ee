"""The benches of links at a small size: real processes and sockets, a tiny engine, and every way to answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.children import Child, sidecar
from benchmarks.fetch import figures as fetch_figures
from benchmarks.many import Crowd
from benchmarks.many import figures as many_figures
from benchmarks.neighbours import ONE, SHARED, hits_of
from benchmarks.shaped import Cell, Edge
from ctxreuse.bench.measure import Options
from ctxreuse.errors import EngineError
from support.tiny_text import tiny_engine

pytestmark = pytest.mark.timing


def test_an_edge_behind_links(tmp_path: Path) -> None:
    engine = tiny_engine()
    prompt = np.random.default_rng(3).integers(0, 256, 1570).astype("<i4")
    edge = Edge(engine, prompt, 32, tmp_path)
    try:
        assert len(edge.context) == 24 * 64
        found = {f.metric: f for f in fetch_figures(edge, "bf16", Options(quick=True), rates=(1000,), rounds=1)}
    finally:
        edge.close()
    assert found["same_token_bf16"].value == 1
    assert 0 <= found["logits_differ_bf16"].value < 1e-4
    cell = found["fetch_1000mbit_40ms_bf16"]
    assert cell.value > 0 < (cell.baseline or 0)
    assert (cell.peer or 0) > 0.04, "a blocking fetch takes a round trip"
    assert (cell.bound or 0) > 0.04
    assert cell.bar is not None
    assert {"first_contact_200mbit_40ms_bf16", "falling_link_1000mbit_40ms_bf16", "over_the_bound_bf16"} <= set(found)


def test_bounds_of_a_cell(tmp_path: Path) -> None:
    engine = tiny_engine()
    edge = Edge(engine, np.arange(160, dtype="<i4"), 32, tmp_path)
    try:
        edge.recompute()
        slow, fast = Cell(20, 0.04), Cell(1000, 0.002)
        assert slow.name == "20mbit_40ms"
        assert edge.nbytes == 128 * engine.space.token_nbytes
        assert edge.bound(slow) == pytest.approx(max(edge.nbytes / 2.5e6 + 0.04, edge.question))
        for cell in (slow, fast):
            assert 0 < edge.both(cell) <= edge.bound(cell)
    finally:
        edge.close()


def test_a_crowd(tmp_path: Path) -> None:
    with sidecar(tmp_path, capacity=128 << 20) as cloud:
        crowd = Crowd(cloud, 8)
        try:
            crowd.fill()
            crowd.warm(50)
            seconds = crowd.run(0.6)
        finally:
            crowd.close()
    found = {figure.metric: figure for figure in many_figures(crowd, seconds, (0.5, 0.5), bars=True)}
    assert len(crowd.millis) == sum(crowd.counts[kind] for kind in ("match", "fetch", "give", "fetch given")) > 20
    assert crowd.counts["bytes"] > 64 << 10
    assert (found["lost"].value, found["duplicated"].value) == (0, 0)
    assert found["memory_growth"].bar is not None
    assert found["p99"].value >= found["p50"].value > 0


def test_neighbours_keep_their_hits() -> None:
    hits = [hits_of(tenants, flooded=True, rounds=1, capacity=16 << 20) for tenants in (SHARED, ONE)]
    assert hits[0] == 1
    assert hits[1] < 1  # as one tenant they evict each other


def test_a_child_that_does_not_start() -> None:
    with pytest.raises(EngineError):
        Child("ctxreuse.bench.report")
