"""How long drafts are: gains where they are right, bounded losses where they are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.speculate import DraftPolicy, PassCosts, PassLoad
from ctxreuse.speculate.policy import Confidence, DraftLedger
from support.examples import examples

MOST = 32


def seconds_of(rows: int, base: float, row: float) -> float:
    return base + row * rows


def costs_of(base: float, row: float) -> PassCosts:
    costs = PassCosts()
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32):
        for _ in range(7):
            costs.observe(rows, 1, seconds_of(rows, base, row))
    for _ in range(7):
        costs.observe(1, 1, seconds_of(1, base, row))
    return costs


def simulate(right: float, base: float, row: float, answers: int = 6, tokens: int = 160, seed: int = 0) -> float:
    """Seconds with drafts as a share of those without, where each token of a draft is right with probability
    ``right``, over ``answers`` of one engine."""
    rng, policy = np.random.default_rng(seed), DraftPolicy(costs_of(base, row))
    spent = plain = 0.0
    for _ in range(answers):
        ledger, made = DraftLedger(), 0
        while made < tokens:
            draft = [Confidence(8, 0.9)] * MOST
            length, _ = policy.length(draft, PassLoad(), ledger)
            good = int(np.argmin(np.append(rng.random(MOST) < right, False)))
            accepted, took = min(good, length), seconds_of(1 + length, base, row)
            policy.costs.observe(1 + length, 1, took)
            policy.observe(draft[: min(accepted + 1, MOST)], accepted, ledger)
            policy.settle(ledger, took, PassLoad(), length, accepted)
            made, spent = made + 1 + accepted, spent + took
        plain += made * seconds_of(1, base, row)
    return spent / plain


@pytest.mark.parametrize("row", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("right", [0.0, 0.05, 0.2, 0.5])
def test_never_slower_than_plain_decoding_by_more_than_3_percent(right: float, row: float) -> None:
    """A row costs this share of a pass of one: 1.0 is an engine that gains nothing by batching."""
    assert simulate(right, 1.0 - row, row) <= 1.03


def test_what_is_right_is_drafted_long() -> None:
    assert simulate(0.98, 0.9, 0.1) < 1 / 3.5


@pytest.mark.parametrize(("row", "least", "most"), [(0.005, 20, MOST), (0.05, 6, 20), (0.5, 1, 5)])
def test_drafts_become_as_long_as_rows_cost_though_no_long_pass_was_measured(row: float, least: int, most: int) -> None:
    """Of each ten tokens nine are right, so a draft is worth less and less; what its rows cost is found by drafting."""
    costs = PassCosts()
    policy, ledger, draft = DraftPolicy(costs), DraftLedger(), [Confidence(16, 0.95)] * MOST
    for _ in range(3):
        costs.observe(1, 1, 1.0)
    for _ in range(60):
        policy.observe(draft[:10], 9, ledger)
    for _ in range(12):
        length, _ = policy.length(draft, PassLoad(), ledger)
        costs.observe(1 + length, 1, 1 + row * length)
    assert least <= length <= most


def test_a_full_batch_stops_drafts() -> None:
    """Where others' rows already cost as much as the engine can do, a further one is not free."""
    policy, ledger = DraftPolicy(costs_of(0.9, 0.1)), DraftLedger()
    draft = [Confidence(3, 0.5)] * MOST
    alone, _ = policy.length(draft, PassLoad(), ledger)
    for rows in (16, 24, 32):
        for _ in range(3):
            policy.costs.observe(rows, rows, seconds_of(rows, 0.0, 0.2))
    beside, why = policy.length(draft, PassLoad(15), ledger)
    assert alone > 0
    assert (beside, why) == (0, "cost")


@examples("light")
@given(
    draft=st.lists(st.builds(Confidence, st.integers(3, 64), st.floats(0.01, 1.0), st.booleans()), max_size=MOST),
    load=st.builds(PassLoad, st.integers(0, 40), st.integers(0, 400), st.booleans()),
    seen=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 40), st.floats(1e-6, 10.0)), max_size=60),
    saved=st.floats(-10, 10),
)
def test_a_length_is_within_the_draft_and_has_a_reason(
    draft: list[Confidence], load: PassLoad, seen: list[tuple[int, int, float]], saved: float
) -> None:
    costs = PassCosts()
    for rows, contexts, seconds in seen:
        costs.observe(rows, min(contexts, rows), seconds)
    policy, ledger = DraftPolicy(costs), DraftLedger(sampled=len(draft) % 2 == 0)
    ledger.saved = saved
    length, why = policy.length(draft, load, ledger)
    assert 0 <= length <= len(draft)
    assert bool(why) == (length < len(draft)) or (why == "unknown" and not draft) or (why == "lost" and not draft)
    for one in draft:
        assert 0 <= policy.chance(one, ledger) <= 1
    again = PassCosts()
    again.restore(costs.dump())
    assert again.dump() == costs.dump()
