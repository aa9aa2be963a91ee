"""The controller keeps its budget in every window under drift, saves most of what could be, and fails closed."""

from __future__ import annotations

from math import floor

import numpy as np
import pytest

from ctxreuse.errors import ConfigError
from ctxreuse.exits import MOST_PENDING, WINDOW, ExitController, ExitGate, ExitRow, RampCost
from ctxreuse.exits.records import Records

COSTS = (RampCost(0.45, 0.003), RampCost(0.2, 0.003))
CALLER = b"caller"


def drifting(seed: int, each: int = 1200) -> tuple[np.ndarray, np.ndarray]:
    """Scores and whether they are right, [n, 2], of three texts: what a score means changes from one to the next."""
    rng = np.random.default_rng(seed)
    scores, right = [], []
    for sharpness in (3.0, 1.0, 6.0):
        sure = rng.beta(2, 1.5, (each, 1)) * np.array([[0.9, 1.0]])
        scores.append(sure)
        right.append(rng.random((each, 2)) < 1 - (1 - sure) ** sharpness)
    return np.concatenate(scores), np.concatenate(right)


class Stream:
    """Tokens through a gate, as an engine passes them, with what came of each."""

    def __init__(self, gate: ExitGate) -> None:
        self.gate, self.wrong, self.saved = gate, list[bool](), 0.0
        self.pending = list[ExitRow]()

    def feed(self, scores: np.ndarray, right: np.ndarray) -> int:
        plan, left = self.gate.plan(), -1
        for ramp in plan.ramps:
            self.saved -= COSTS[ramp].cost
            if left < 0 and ramp in plan.least and scores[ramp] >= plan.least[ramp]:
                left = ramp
        row = ExitRow({r: float(scores[r]) for r in plan.ramps}, {r: bool(right[r]) for r in plan.ramps}, left)
        self.wrong.append(left >= 0 and not right[left])
        if left >= 0:
            self.saved += COSTS[left].saved
            self.pending.append(row)
            self.gate.settle(left, ())
        else:
            self.gate.settle(-1, (*self.pending, row))
            self.pending = []
        assert len(self.pending) <= MOST_PENDING
        return left

    def worst(self) -> int:
        return int(np.convolve(self.wrong, np.ones(WINDOW), "valid").max())


def gate_of(controller: ExitController, budget: float, caller: bytes = CALLER) -> ExitGate:
    gate = controller.gate(caller, budget)
    assert gate is not None
    return gate


@pytest.mark.parametrize("budget", [0.01, 0.02, 0.05])
def test_a_budget_is_kept_in_every_window_under_drift(budget: float) -> None:
    scores, right = drifting(3)
    controller = ExitController(COSTS)
    stream = Stream(gate_of(controller, budget))
    for one in zip(scores, right):
        stream.feed(*one)
        controller.check()
    assert 0 < stream.worst() <= floor(budget * WINDOW)
    assert sum(stream.wrong) <= budget * len(stream.wrong)
    # The best threshold in hindsight knows the whole text.
    records = Records(2, len(scores), np.inf)
    for one, of in zip(scores, right):
        records.add(one.tolist(), of.tolist())
    best = records.best(COSTS, budget).saved
    assert stream.saved / len(scores) >= 0.6 * best
    assert stream.gate.exited == stream.gate.verified + len(stream.pending)
    assert stream.gate.wrong <= sum(stream.wrong)


def test_a_ramp_that_lies_breaks_no_budget() -> None:
    """All scores are high: first all tokens are right, then all are wrong."""
    controller = ExitController(COSTS)
    stream = Stream(gate_of(controller, 0.02))
    for n in range(3000):
        stream.feed(np.array([0.9, 0.9]), np.array([n < 1200, n < 1200]))
    assert stream.worst() <= 10
    assert sum(stream.wrong[2000:]) <= 3, "its records must keep it from trying it for ever"


def test_nothing_leaves_before_enough_is_known() -> None:
    gate = gate_of(ExitController(COSTS), 0.2)
    stream = Stream(gate)
    left = [stream.feed(np.array([1.0, 1.0]), np.array([True, True])) for _ in range(80)]
    assert left[:64] == [-1] * 64
    assert max(left) >= 0
    assert gate.refused["unknown"] == 64


def test_callers_and_budgets_have_accounts_of_their_own() -> None:
    controller = ExitController(COSTS)
    one = Stream(gate_of(controller, 0.02))
    for _ in range(600):
        one.feed(np.array([0.9, 0.9]), np.array([True, True]))
    other = Stream(gate_of(controller, 0.02, b"other"))  # what ramps are worth is known, but nothing was earned
    for n in range(49):
        assert other.feed(np.array([0.9, 0.9]), np.array([True, True])) < 0, n
    with pytest.raises(ConfigError):
        controller.gate(CALLER, 0.5)


def test_too_many_callers_are_refused_only_if_they_have_spent() -> None:
    controller = ExitController(COSTS)
    for n in range(300):
        assert controller.gate(b"%d" % n, 0.02) is not None


def test_a_state_survives_and_one_that_was_not_left_clean_closes_budgets() -> None:
    controller = ExitController(COSTS)
    stream = Stream(gate_of(controller, 0.05))
    scores, right = drifting(5, each=400)
    for one in zip(scores, right):
        stream.feed(*one)
    clean, unclean = ExitController(COSTS), ExitController(COSTS)
    clean.restore(controller.dump(clean=True))
    unclean.restore(controller.dump())
    for again, closed in ((clean, False), (unclean, True)):
        more = Stream(gate_of(again, 0.05))
        left = [more.feed(*one) for one in zip(scores[-480:], right[-480:])]
        assert max(left[:64]) < 0, "what was learnt before is not believed before it is seen again"
        assert (max(left) < 0) == closed
        joined = stream.wrong + more.wrong
        assert int(np.convolve(joined, np.ones(WINDOW), "valid").max()) <= 25
    with pytest.raises(ValueError, match="records"):
        ExitController((*COSTS, COSTS[0])).restore(controller.dump())


def test_a_step_that_fails_leaves_its_token_counted_as_wrong() -> None:
    controller = ExitController(COSTS)
    stream = Stream(gate_of(controller, 0.02))
    for _ in range(600):
        stream.feed(np.array([0.9, 0.9]), np.array([True, True]))
    for _ in range(12):
        plan = stream.gate.plan()  # and no settle
    assert not plan.least
    controller.check()
