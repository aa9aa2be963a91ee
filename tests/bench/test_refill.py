"""The simulation of refilled stages: between whole passes and the bound."""

from __future__ import annotations

import pytest

from benchmarks.refill import Stages, best_rate

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
