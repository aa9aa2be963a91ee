"""What bench sidecar measures with."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.proxy import backend
from benchmarks.sidecar import DIRECT, OURS, ask, figures


@pytest.mark.timing
def test_each_question_is_answered_once() -> None:
    with backend() as url:
        seen = asyncio.run(ask(url, 1, 3, 10, 0))
    assert len(seen) == 10
    assert min(seen) > 0


def test_what_is_added_is_paired() -> None:
    medians = {DIRECT: [0.001, 0.003, 0.002], OURS: [0.0014, 0.0034, 0.0025], "other": [0.002, 0.004, 0.003]}
    (figure,) = figures(1, 1, medians)
    assert round(figure.value, 6) == 0.4
    assert (round(figure.peer or 0, 6), figure.bar, figure.passed) == (1.0, 0.5, True)
    assert figure.baseline == 2.0
