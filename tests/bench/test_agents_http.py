"""Benches agents_http and restart: both servers answer agents over HTTP, and the daemon goes on after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import agents_http, restart
from ctxreuse.bench.measure import Options
from support.tiny_gguf import write_tiny_gguf


@pytest.mark.daemon
@pytest.mark.slow
def test_agents_talk_to_both_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_SYSTEM", 30), ("_FIRST", (4, 8)), ("_LATER", 2), ("_PAUSE", 0.01), ("_TOKENS", 4)):
        monkeypatch.setattr(agents_http, name, value)
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    options = Options(quick=True, model=str(model))
    figures = {figure.metric: figure for figure in [*agents_http.run(options), *restart.run(options)]}
    assert set(figures) == {"speed_2", "first_2", "later_2", "2 agents"}
    for figure in figures.values():
        assert figure.value > 0
        assert figure.peer is not None
        assert figure.peer > 0


def test_what_a_round_says() -> None:
    turns = [agents_http.Turn(first, [0.1, 0.3], 3) for first in (2.0, 0.5, 0.7)]
    both = agents_http.Round([turns, turns[:2]], 5.0)
    assert both.starts() == [2.0, 2.0]
    assert both.later() == [0.5, 0.7, 0.5]
    assert both.speed() == 3.0
    assert len(both.gaps()) == 10
    assert agents_http.ninety_fifth([float(n) for n in range(100)]) == 95.0
