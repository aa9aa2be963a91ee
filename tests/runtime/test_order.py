"""Whose prefill is next, and how much of it goes with others' tokens, in simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctxreuse.runtime.steps.order import BACKGROUND, INTERACTIVE, NORMAL, PrefillOrder, RequestTurn
from ctxreuse.runtime.steps.slices import FIRST_SLICE, UNSEEN, SliceEstimator
from support.examples import examples

#: Seconds of a token, and tokens of a pass.
EACH, PASS = 0.005, 512


class Prompts:
    """Prefills of one engine; ``add`` brings one, ``run`` computes until all, or some, are done."""

    def __init__(self) -> None:
        self.order, self.now = PrefillOrder(), 0.0
        self.left: dict[RequestTurn, int] = {}
        self.took: dict[RequestTurn, float] = {}
        self.number = 0

    def add(self, tokens: int, *, priority: int = NORMAL, tenant: str = "", session: str = "") -> RequestTurn:
        self.number += 1
        turn = RequestTurn(self.number, self.now, priority=priority, tenant=tenant, session=session)
        self.left[turn] = tokens
        return turn

    def step(self) -> RequestTurn:
        turn = self.order.first(list(self.left), self.now)
        count = min(PASS, self.left[turn])
        self.now += EACH * count
        self.left[turn] -= count
        self.order.charge(turn, count, self.left[turn])
        turn.started = True
        if not self.left[turn]:
            del self.left[turn]
            self.took[turn] = self.now - turn.since
        return turn

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.left and not until():
            self.step()


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=12))
def test_equal_prompts_end_in_the_order_in_which_they_came(lengths: list[int]) -> None:
    prompts = Prompts()
    turns = [prompts.add(tokens) for tokens in lengths]
    prompts.run()
    assert list(prompts.took) == turns


def test_the_more_urgent_goes_first_and_interrupts_after_a_pass() -> None:
    prompts = Prompts()
    background = prompts.add(2 * PASS, priority=BACKGROUND)
    assert prompts.step() is background
    normal, urgent = prompts.add(PASS), prompts.add(PASS, priority=INTERACTIVE)
    assert [prompts.step() for _ in range(3)] == [urgent, normal, background]


def test_background_of_one_tenant_yields_to_another_that_has_had_more() -> None:
    prompts = Prompts()
    prompts.add(20 * PASS, tenant="a")
    prompts.run()
    background, normal = prompts.add(PASS, tenant="b", priority=BACKGROUND), prompts.add(PASS, tenant="a")
    assert [prompts.step(), prompts.step()] == [normal, background]


def test_waiting_makes_urgent() -> None:
    """Urgent prompts come as fast as they are computed, and one in the background is computed all the same."""
    prompts = Prompts()
    background = prompts.add(PASS, priority=BACKGROUND)
    while background not in prompts.took:
        prompts.add(PASS, priority=INTERACTIVE)
        prompts.step()
        assert prompts.now < 100


@examples("normal")
@given(st.integers(0, 1 << 32), st.sampled_from([INTERACTIVE, NORMAL]))
def test_who_floods_delays_another_tenant_by_at_most_as_much_again(seed: int, claimed: int) -> None:
    """However urgent the flood says that it is."""
    rng, prompts = random.Random(seed), Prompts()
    ratios = []
    for _ in range(30):
        for _ in range(5 - sum(turn.tenant == "flood" for turn in prompts.left)):
            prompts.add(rng.randrange(4_000, 16_000), tenant="flood", priority=claimed)
        before = prompts.now + rng.uniform(5, 60)
        prompts.run(lambda before=before: prompts.now > before)  # type: ignore[misc]
        tokens = rng.randrange(700, 3_000)
        mine = prompts.add(tokens, tenant="other")
        prompts.run(lambda mine=mine: mine in prompts.took)  # type: ignore[misc]
        ratios.append(prompts.took[mine] / (EACH * tokens))
    assert sorted(ratios)[int(0.95 * len(ratios))] <= 2.0


def test_the_next_turn_of_a_conversation_does_not_wait_for_others_first_ones() -> None:
    order = PrefillOrder()
    begun, long, question = (RequestTurn(number, 0.0) for number in range(3))
    begun.started = True
    assert order.first([begun, long, question], 1.0, {question}) is question
    assert order.first([begun, long], 1.0) is begun
    # Those who have waited for long take turns with it, so that questions hold up nothing for ever.
    question.since = 20.0
    assert order.first([begun, long, question], 30.0, {question}) is question
    order.charge(question, 40, 60, short=True)
    assert order.first([begun, long, question], 30.0, {question}) is begun


def test_sessions_of_a_tenant_take_turns_by_prompt() -> None:
    prompts = Prompts()
    for _ in range(4):
        prompts.add(4 * PASS, session="greedy")
    prompts.step()
    other = prompts.add(PASS, session="modest")
    prompts.run()
    assert list(prompts.took).index(other) == 1  # after the one that had begun


@examples("normal")
@example(0, 0.125, 1.25, 0.0001, 0.0, 1)
@example(188402318, 0.125, 0.0, 0.0078125, 0.0, 1)  # three of the first five passes are disturbed
@given(
    st.integers(0, 1 << 32),
    st.floats(0.002, 0.2),
    st.floats(0.0, 2.5),
    st.floats(0.0001, 0.01),
    st.floats(0.0, 0.05),
    st.sampled_from([1, 4, 9]),
)
def test_slices_are_as_long_as_the_others_may_wait(
    seed: int, alone: float, fixed: float, each: float, noise: float, decoding: int
) -> None:
    """A pass that decodes takes ``alone``; one with a slice ``fixed`` times that more, and ``each`` a token."""
    rng, slices = random.Random(seed), SliceEstimator()
    assert slices.tokens(decoding) == FIRST_SLICE

    def seconds(prefill: int, at: int) -> float:
        return alone + bool(prefill) * alone * fixed + prefill * each * (1 + at / 20_000)

    def measured(prefill: int, at: int) -> float:
        disturbed = 10.0 if rng.random() < 0.03 else 1.0  # something else ran
        return seconds(prefill, at) * disturbed * rng.uniform(1, 1 + noise)

    for _ in range(5):
        slices.observe(decoding, 0, measured(0, 0))
    at, ratios, planned = 0, [], []
    for _ in range(200):
        planned.append(slices.tokens(decoding))
        ratios.append(seconds(planned[-1], at) / max(slices.stall(alone), seconds(16, at)))
        slices.observe(decoding, planned[-1], measured(planned[-1], at))
        at += planned[-1]
    slices.observe(decoding, 3, alone)  # the end of a prompt
    assert sorted(ratios)[-10] <= 1
    # Passes aim at 0.85 of what others may wait, and passes that were disturbed shorten the next ones.
    aimed = (0.85 * slices.stall(alone) - (1 + fixed) * alone) / (each * (1 + at / 20_000))
    assert sorted(planned[20:])[20] >= min(0.5 * aimed, 400) or 16 in planned[20:]
    assert all(16 <= count <= 512 for count in planned)


@pytest.mark.parametrize("stall", [UNSEEN, 0.4])
def test_fast_steps_may_be_made_as_long_as_others_may_wait(stall: float) -> None:
    slices = SliceEstimator(stall=stall)
    for _ in range(5):
        slices.observe(1, 0, 0.01)
    for _ in range(40):
        slices.observe(1, slices.tokens(1), 0.01 + 0.001 * slices.tokens(1))
    assert 0.7 * stall <= 0.01 + 0.001 * slices.tokens(1) <= stall


def test_a_first_slice_is_as_long_as_other_passes_let_expect() -> None:
    slices = SliceEstimator()
    slices.observe_alone(512, 0.25)
    slices.observe(1, 0, 0.015)
    expected = 0.5 * 512 / 0.25 * (0.85 * UNSEEN - 0.015)
    assert slices.tokens(1) == pytest.approx(expected, abs=1), "half of the speed without others"
    slices.observe(1, slices.tokens(1), 0.1)
    assert slices.tokens(8) == slices.tokens(1) > expected, "as beside the nearest number of answers"
    slices.observe(4, 0, 0.02)
    slices.observe(4, slices.tokens(4), 0.4)
    assert slices.tokens(8) == slices.tokens(4) < slices.tokens(1)


def test_an_engine_that_does_not_batch_learns_from_its_prefill_passes() -> None:
    slices = SliceEstimator()
    for _ in range(5):
        slices.observe(1, 0, 0.05)
    for _ in range(40):
        slices.observe(0, slices.tokens(1), 0.0005 * slices.tokens(1))
    assert 0.05 + 0.0005 * slices.tokens(1) <= slices.stall(0.05)
    assert slices.tokens(1) > 100


def test_a_question_does_not_wait_for_prompts_that_have_waited_long() -> None:
    order, now = PrefillOrder(), 100.0
    long = [RequestTurn(number, 0.0) for number in range(8)]
    question, urgent = RequestTurn(9, now), RequestTurn(10, now, priority=INTERACTIVE)
    assert order.first([*long, question], now, {question}) is question
    assert order.first([RequestTurn(0, now), urgent, question], now, {question}) is urgent
    late = RequestTurn(11, now, priority=BACKGROUND)
    assert order.first([*long, late], now, {late}) in long


def test_questions_without_end_leave_every_other_pass_to_who_has_waited_long() -> None:
    order, long, now = PrefillOrder(), RequestTurn(0, 0.0), 100.0
    served = []
    for number in range(1, 21):
        question = RequestTurn(number, now)
        first = order.first([long, question], now, {question})
        order.charge(first, 40, 1_000, short=first is question)
        first.started = True
        served.append(first is long)
    assert served == [False, True] * 10
    # Until then they go first: each delays it by little.
    fresh = [RequestTurn(30, now), RequestTurn(31, now)]
    for _ in range(3):
        assert order.first(fresh, now + 1, {fresh[1]}) is fresh[1]
        order.charge(fresh[1], 40, 0, short=True)
