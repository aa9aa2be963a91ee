"""Drafters behind one interface: texts, a token at a call, and blocks; and what a model's drafts may cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.speculate import (
    MODEL,
    AnswerDrafter,
    Confidence,
    Continuation,
    DraftLedger,
    DraftMemory,
    DraftPolicy,
    DraftPrice,
    PassCosts,
    PassLoad,
)
from support.examples import examples

PROMPT = np.arange(3, 40, dtype="<i4")


class Blocks:
    """A drafter that fills blocks: up to ``size`` tokens of a script at a call, each right with a probability."""

    def __init__(self, script: Any, size: int, call: float, right: float = 1.0, begin: float = 0.0) -> None:
        self._script, self._size, self._call, self._right = script, size, call, right
        self._rng = np.random.default_rng(0)
        self._begin, self.seconds, self.calls = begin, 0.0, 0

    def price(self, history: Any) -> DraftPrice:
        return DraftPrice(self._begin, self._call / self._size)

    def draft(self, history: Any, ahead: Any, most: int) -> Continuation:
        at = len(history) + len(ahead) - len(PROMPT)
        ids = self._script[at : at + min(self._size, most)].copy()
        wrong = self._rng.random(len(ids)) >= self._right
        ids[wrong] += 1
        self.calls += 1
        self.seconds += self._call + self._begin
        self._begin = 0.0
        return Continuation(ids, np.full(len(ids), self._right, np.float32), MODEL)


def known_costs(row: float) -> PassCosts:
    costs = PassCosts()
    for rows in (*range(8, 0, -1), 12, 20, 28, 36):
        for _ in range(7):
            costs.observe(rows, 1, 1 + row * (rows - 1))
    costs.observe(1, 1, 1.0)
    return costs


def answered(drafter: AnswerDrafter, model: Blocks, script: Any, costs: PassCosts, row: float) -> float:
    """Seconds of an answer of these tokens, of which a pass of one takes 1."""
    history, done, spent = PROMPT, 0, 0.0
    while done < len(script):
        before = model.seconds
        draft = drafter.next(history, len(script) - done - 1, PassLoad())
        right = 0
        while right < len(draft) and draft[right] == script[done + right]:
            right += 1
        came = script[done : done + right + 1]
        seconds = 1 + row * len(draft)
        costs.observe(1 + len(draft), 1, seconds)
        drafter.checked(came.tolist(), seconds, PassLoad())
        spent += seconds + model.seconds - before
        done += right + 1
        history = np.concatenate([PROMPT, script[:done]])
    return spent


def script_of(n: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(50, 5000, n).astype("<i4")


def test_a_drafter_that_fills_blocks_is_asked_once_a_block() -> None:
    script, costs = script_of(120), known_costs(0.05)
    model = Blocks(script, 8, call=0.4)
    drafter = AnswerDrafter(DraftPolicy(costs), DraftMemory(), "", PROMPT, model=model)
    spent = answered(drafter, model, script, costs, 0.05)
    assert spent < 120 / 2
    assert drafter.accepted_by_model == drafter.accepted > 80
    assert model.calls <= drafter.drafted_by_model / 4
    assert drafter.saved == pytest.approx(120 - spent, abs=3)


@pytest.mark.parametrize("right", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("call", [0.05, 0.4])
@pytest.mark.parametrize("begin", [0.0, 30.0])
def test_a_model_never_costs_more_than_it_may(right: float, call: float, begin: float) -> None:
    """Over six answers of 200 tokens: 3 % of the time, three passes, and what a first prompt was tried with."""
    costs = known_costs(0.1)
    policy, spent = DraftPolicy(costs), 0.0
    for number in range(6):
        script = script_of(200, number)
        model = Blocks(script, 1, call, right, begin)
        drafter = AnswerDrafter(policy, DraftMemory(), "", PROMPT, model=model)
        spent += answered(drafter, model, script, costs, 0.1)
    assert spent <= 1200 * 1.03 + 3 + begin


def test_a_model_that_is_right_earns_a_long_prompt() -> None:
    costs = known_costs(0.1)
    policy, spent = DraftPolicy(costs), 0.0
    for number in range(24):  # it was tried out
        policy.observe([Confidence(MODEL, 0.9)], number % 10 > 0, DraftLedger(model=True))
    for number in range(3):
        script = script_of(200, number)
        model = Blocks(script, 1, 0.1, 0.9, begin=20.0)
        spent += answered(AnswerDrafter(policy, DraftMemory(), "", PROMPT, model=model), model, script, costs, 0.1)
    assert spent < 600 / 1.5


def test_texts_are_drafted_from_where_they_promise_more() -> None:
    script, costs = np.tile(script_of(40), 4), known_costs(0.05)
    model = Blocks(script, 1, call=0.5, right=0.8)
    drafter = AnswerDrafter(DraftPolicy(costs), DraftMemory(), "", PROMPT, model=model)
    answered(drafter, model, script, costs, 0.05)
    assert drafter.accepted - drafter.accepted_by_model > 90


@examples("light")
@given(
    text=st.lists(st.integers(0, 5), min_size=8, max_size=120),
    tail=st.integers(1, 100),
    stops=st.frozensets(st.integers(0, 5), max_size=3),
)
def test_nothing_is_drafted_behind_a_token_that_ends_the_answer(
    text: list[int], tail: int, stops: frozenset[int]
) -> None:
    memory, ids = DraftMemory(), np.array(text * 3, "<i4")
    memory.learn("", ids, [], 64)
    history = ids[: len(text) + tail % len(text)]

    def drafted(stops: frozenset[int]) -> list[int]:
        policy = DraftPolicy(known_costs(0.001))
        return list(map(int, AnswerDrafter(policy, memory, "", history, stops=stops).next(history, 100, PassLoad())))

    whole, cut = drafted(frozenset()), drafted(stops)
    assert not stops & set(cut[:-1])
    first = next((at for at, token in enumerate(whole, 1) if token in stops), len(whole))
    assert cut == whole[:first]


def test_a_model_is_not_asked_what_follows_the_end() -> None:
    script, policy = script_of(60), DraftPolicy(known_costs(0.01))
    for _ in range(40):  # the model was right before
        policy.observe([Confidence(MODEL, 1.0)], 1, DraftLedger(model=True))
    for number in (5, 12):
        model, stops = Blocks(script, 1, call=0.02), {int(script[number])}
        drafter = AnswerDrafter(policy, DraftMemory(), "", PROMPT, model=model, stops=stops)
        assert drafter.next(PROMPT, 60, PassLoad()).tolist() == script[: number + 1].tolist()
        assert model.calls == number + 1
