"""What agents on one engine wait for, in simulated time: passes as the planner plans them, as long as llama.cpp's."""

from __future__ import annotations

import statistics

import pytest

from support.agent_passes import Agents, percentile

#: What llama.cpp asks for, see `LlamaEngine.least_slice`.
LEAST = 128


def test_more_agents_than_before_wait_for_no_whole_answers() -> None:
    few, all_of_them = Agents(16, least_slice=LEAST, running=8).run(), Agents(16, least_slice=LEAST).run()
    assert percentile(few.later) > 4.0
    assert percentile(all_of_them.later) < 1.5
    assert statistics.median(all_of_them.later) < 0.5


@pytest.mark.parametrize("count", [4, 8, 16])
def test_slices_that_the_engine_computes_fast_serve_all_sooner(count: int) -> None:
    short, long = Agents(count).run(), Agents(count, least_slice=LEAST).run()
    assert long.seconds < 0.9 * short.seconds
    assert statistics.mean(long.first) < 0.85 * statistics.mean(short.first)
    assert statistics.median(long.later) <= statistics.median(short.later)
    assert percentile(long.later) < (0.5 if count < 16 else 1.2), "a question waits for a slice or two of others"
    assert max(long.gaps) < 0.7, "a slice, and what the others decode"


def test_one_agent_has_the_engine_for_itself() -> None:
    alone = Agents(1, least_slice=LEAST).run()
    assert alone.first == Agents(1).run().first
    assert max(alone.gaps) < 0.02
