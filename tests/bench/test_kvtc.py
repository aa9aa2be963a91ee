"""KVTC as a rival: the groups are the cheapest there are, and more bits are less error."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from benchmarks.rivals import Kvtc, KvtcBasis
from benchmarks.rivals.kvtc import Group

CHANNELS = 96


def rows(seed: int, tokens: int = 200) -> Any:
    """Tokens whose channels depend on each other, with means of their own."""
    mixed = np.random.default_rng(0).standard_normal((CHANNELS, CHANNELS)) * 0.8 ** np.arange(CHANNELS)[:, None]
    drawn = np.random.default_rng(seed).standard_normal((tokens, CHANNELS))
    return (drawn @ mixed + 3).astype(np.float32)


@pytest.fixture(scope="module")
def basis() -> KvtcBasis:
    return KvtcBasis.learn(rows(1, 600))


def bits(group: Group) -> int:
    return group.size * group.width + 32 * bool(group.width)


def test_no_other_cut_of_the_components_has_less_error_at_the_same_bits(basis: KvtcBasis) -> None:
    plan = basis.plan(2.0)
    assert [group.first for group in plan] == list(np.cumsum([0, *(group.size for group in plan[:-1])]))
    assert sum(group.size for group in plan) == CHANNELS
    spent = sum(map(bits, plan))
    assert spent <= 2 * CHANNELS
    error = sum(basis.errors[group] for group in plan)
    for sizes in itertools.product((16, 64), repeat=6):
        ends = np.cumsum(sizes)
        if CHANNELS not in ends:
            continue
        cut = [(end - size, size) for end, size in zip(ends, sizes) if end <= CHANNELS]
        for widths in itertools.product((0, 2, 4, 8), repeat=len(cut)):
            groups = [Group(int(first), size, width) for (first, size), width in zip(cut, widths)]
            if sum(map(bits, groups)) <= spent:
                assert sum(basis.errors[group] for group in groups) >= error * (1 - 1e-6)


def test_more_bits_are_less_error_and_all_of_them_are_counted(basis: KvtcBasis) -> None:
    x = rows(2)
    found = [Kvtc(budget).code(x, basis) for budget in (6, 4, 2, 1)]
    errors = [float(np.square(back - x).mean() / x.var()) for back, _ in found]
    assert errors == sorted(errors)
    assert errors[0] < 1e-3
    assert errors[-1] < 0.5
    spent = [used / x.size for _, used in found]
    assert spent == sorted(spent, reverse=True)
    for (_, used), budget in zip(found, (6, 4, 2, 1)):
        side = sum(32 for group in basis.plan(budget) if group.width)
        assert side * len(x) < used <= budget * x.size
