"""Traces sent to several nodes: the bound, rules against each other, and who loses without a price."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from ctxreuse.errors import ConfigError
from ctxreuse.lab.routing import BOUND, RULES, prompt_path, route_trace
from ctxreuse.lab.trace import Request

BLOCK = 64


def prefill(tokens: int, cached: int) -> float:
    return 1e-3 * tokens


def conversations(count: int, gap: float) -> list[Request]:
    """Turns of several conversations that share a first block, in an order by chance."""
    rng, turns, found = random.Random(4), dict[int, int](), []
    for n in range(count):
        one = rng.randrange(24)
        turns[one] = turns.get(one, 2) + 1
        blocks = [0, *(1000 * (one + 1) + i for i in range(1, turns[one]))]
        found.append(Request(n * gap, np.array(blocks, np.int64), len(blocks) * BLOCK - 20))
    return found


def test_a_prompt_as_runs() -> None:
    path = prompt_path(Request(0.0, np.array([5, 6], np.int64), 100), BLOCK)
    assert [run.tokens for run in path] == [64, 36]
    beyond = prompt_path(Request(0.0, np.array([5], np.int64), 100), BLOCK)
    assert [run.tokens for run in beyond] == [64, 36]
    other = prompt_path(Request(1.0, np.array([5], np.int64), 100), BLOCK)
    assert beyond[0].key == other[0].key
    assert beyond[1].key != other[1].key, "what belongs to no block is never shared"


def test_one_request_takes_its_prefill() -> None:
    requests = [Request(t, np.array([1, 2], np.int64), 128) for t in (0.0, 10.0, 10.1)]
    found = route_trace(requests, BLOCK, "least-load", 1, math.inf, prefill)
    assert found.mean == pytest.approx(0.128 / 3)
    assert found.reused == pytest.approx(2 / 3)


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_is_better_than_the_bound(rule: str) -> None:
    requests = conversations(400, 0.1)
    bound = route_trace(requests, BLOCK, BOUND, 3, math.inf, prefill)
    found = route_trace(requests, BLOCK, rule, 3, 5_000, prefill)
    assert found.mean >= bound.mean
    assert found.reused <= bound.reused
    assert found == route_trace(requests, BLOCK, rule, 3, 5_000, prefill), "by chance, but with one seed"


def test_the_price_is_no_worse_than_balancing_alone_or_prefixes_alone() -> None:
    for gap in (0.4, 0.12, 0.08):
        requests = conversations(600, gap)
        found = {rule: route_trace(requests, BLOCK, rule, 3, 8_000, prefill).mean for rule in RULES}
        assert found["price"] <= found["least-load"]
        assert found["price"] <= found["longest-prefix"]
        assert found["price"] < found["random"]


def test_a_rule_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="no rule 'best'"):
        route_trace(conversations(2, 1.0), BLOCK, "best", 2, 1000, prefill)
    with pytest.raises(ConfigError, match="no requests"):
        route_trace([], BLOCK, "price", 2, 1000, prefill)
