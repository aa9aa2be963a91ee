"""The simulation of refilled stages: between whole passes and the bound."""

from __future__ import annotations

import pytest

from benchmarks.refill import Stages, answer_rate, best_rate

FLAT = Stages((1, 8, 32), (0.04, 0.04, 0.04), (0.02, 0.02, 0.02))
STEEP = Stages((1, 8, 32), (0.01, 0.04, 0.16), (0.005, 0.02, 0.08))


@pytest.mark.parametrize("leave", [0.0, 0.8])
@pytest.mark.parametrize("stages", [FLAT, STEEP], ids=["a row costs nothing", "a row costs all"])
def test_refilling_is_near_the_bound_and_never_beyond(stages: Stages, leave: float) -> None:
    whole, split, refilled = (best_rate(stages, way, leave, 1500) for way in ("whole", "split", "refilled"))
    first, second = stages.seconds(0, 8), stages.seconds(1, 8)
    bound = (first + second) / (first + (1 - leave) * second)
    most = 8 / (first + (1 - leave) * second)
    assert 0.85 * bound <= refilled / whole
    assert refilled <= most * 1.03, "a random sample may ask for a little less"
    assert split >= 0.97 * whole


@pytest.mark.parametrize("answers", [1, 8])
@pytest.mark.parametrize("leave", [0.0, 0.3, 0.8])
def test_answers_whose_tokens_leave_save_readings_of_weights_and_no_rows(answers: int, leave: float) -> None:
    """Where a row costs all, nothing can be gained, as each is computed at last; where it costs nothing, no more than
    the second stage of those that left."""
    by_rows = Stages((1, 32), (0.005, 0.16), (0.0025, 0.08))
    for stages, gains in ((by_rows, False), (FLAT, True)):
        whole = answers / (stages.seconds(0, answers) + stages.seconds(1, answers))
        bound = 1.5 / (1.5 - 0.5 * leave) if gains else 1.0
        for first, second in ((answers, 0), (answers, answers), (1, 1), (answers // 2, answers // 2)):
            rate = answer_rate(stages, answers, leave, 1500, first, second)
            assert rate <= whole * bound * 1.05
            if not leave:
                assert rate == pytest.approx(whole)
    if answers == 1 and leave:
        assert answer_rate(FLAT, 1, leave, 1500, 1, 1) > 1.03 / 0.06
