"""Numbered schedules of faults on links: see `support.simulator.link`."""

from __future__ import annotations

import itertools

import pytest

from support.examples import scale
from support.simulator import failing, link


@pytest.mark.parametrize("part", range(4))
def test_schedules(part: int) -> None:
    count = scale(300) if scale(100) < 100 else 20_000
    for seed in range(part * count, (part + 1) * count):
        try:
            link.run(seed)
        except Exception as error:
            raise AssertionError(failing("link", seed)) from error


def test_a_link_that_is_cut_after_each_step() -> None:
    """Of a put, two fetches and a match: whatever was on its way, all end well."""
    steps = sum(1 for _ in itertools.takewhile(link.cut_at_each_step, itertools.count()))
    assert steps > 30
