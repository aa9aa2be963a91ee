"""Made-up traffic: the same again for a seed, in order, with the distributions that it names."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ctxreuse.errors import ConfigError
from ctxreuse.lab.generate import KINDS, generate
from ctxreuse.lab.packed import pack
from ctxreuse.lab.trace import TOOL_CALL


@pytest.mark.parametrize("kind", KINDS)
def test_traffic(kind: str) -> None:
    trace = generate(kind, requests=600, seed=3)
    rows = list(trace)
    again = list(generate(kind, requests=600, seed=3))
    other = list(generate(kind, requests=600, seed=4))
    assert len(rows) == trace.rows == 600
    assert all(a.t == b.t and np.array_equal(a.path, b.path) for a, b in zip(rows, again))
    assert [r.t for r in rows] != [r.t for r in other]
    assert all(a.t <= b.t for a, b in pairwise(rows))
    assert all(len(r.path) == r.tokens // 64 for r in rows)
    made = pack(trace)
    made.check()
    assert 0.2 < made.known.sum() / made.length.sum() < 1
    last: dict[int, tuple[float, int, int]] = {}
    for r in rows:
        if r.session in last:
            ended, stop, blocks = last[r.session]
            assert r.t == pytest.approx(ended + r.pause)
            assert r.label == stop
            assert len(r.path) >= blocks
        last[r.session] = (r.t + r.busy, r.stop, len(r.path))


def test_agents_wait_for_tools() -> None:
    rows = list(generate("agents", requests=3000))
    tools = [r.pause for r in rows if r.label == TOOL_CALL]
    people = [r.pause for r in rows if r.label > TOOL_CALL]
    assert len(tools) / (len(tools) + len(people)) == pytest.approx(KINDS["agents"].tools, abs=0.03)
    assert np.median(tools) == pytest.approx(9, rel=0.2)
    assert np.median(people) == pytest.approx(96, rel=0.5)


def test_what_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no traffic is called 'x'"):
        generate("x")
    with pytest.raises(ConfigError, match="at least one"):
        generate("chat", requests=0)
