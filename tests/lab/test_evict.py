"""`python -m benchmarks evict`: figures of every policy, bars only where the real trace is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import evict
from ctxreuse.bench.measure import Options
from ctxreuse.store.policy import NAMES


def test_made_up_traffic_has_no_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CTXREUSE_TRACES", str(tmp_path))  # nothing is there
    figures = evict.run(Options(quick=True))
    assert {figure.metric.split()[-1] for figure in figures} == set(NAMES)
    assert len(figures) == 2 * len(NAMES)
    for figure in figures:
        assert figure.bar is None
        assert figure.bound is not None
        assert figure.baseline is not None
        # Belady is exact, so no policy is above it; the adaptive policy's mean is of runs below it.
        assert 0 < figure.value <= figure.bound
    adaptive = figures[0]
    assert "made-up traffic" in adaptive.note
    assert adaptive.peer == max(f.value for f in figures[1 : len(NAMES)])


def test_the_real_trace_has_bars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"timestamp": 1000 * i, "input_length": 5120, "hash_ids": [*range(k * 10, k * 10 + 10)]}
        for i, k in enumerate(rng.zipf(1.3, 400) % 60)
    ]
    file = tmp_path / evict._FILE.with_suffix("")
    file.parent.mkdir()
    file.write_text("".join(json.dumps(row, default=int) + "\n" for row in rows))
    monkeypatch.setattr(evict, "_FILE", file.relative_to(tmp_path))
    monkeypatch.setattr(evict, "_SIZES", {"1M": 100_000, "2.6M": 200_000})
    monkeypatch.setenv("CTXREUSE_TRACES", str(tmp_path))
    figures = {figure.metric: figure for figure in evict.run(Options())}
    whole, half = figures["1M adaptive"], figures["1M half adaptive"]
    assert "the real trace" in whole.note
    assert whole.bar == max(whole.peer - 0.5, figures["1M lru"].value + 5)
    assert figures["2.6M adaptive"].bar == figures["2.6M adaptive"].peer - 0.5
    # The cache is full by the second half.
    assert half.value > whole.value
