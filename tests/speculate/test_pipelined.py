"""Drafts that are sent ahead of their verdicts: as long as they pay over a link, and dropped where one was wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.speculate import DraftMemory, DraftPolicy, PassCosts, PassLoad, PipelinedDrafter
from ctxreuse.speculate.policy import Confidence, DraftLedger
from support.examples import examples

ALONE = PassLoad()
TEXT = np.random.default_rng(0).permutation(900).astype("<i4")


def costs_of(plain: float, row: float) -> PassCosts:
    """Passes of one row take ``plain`` seconds, each further row ``row`` more."""
    costs = PassCosts()
    for rows in [*range(2, 9), 12, 20, 28, 36, 44, 68, 1]:
        for _ in range(7):
            costs.observe(rows, 1, plain + row * (rows - 1))
    return costs


def policy_of(row: float = 0.001) -> DraftPolicy:
    """What is drafted from a long match was always right so far."""
    policy = DraftPolicy(costs_of(0.04, row))
    for _ in range(20):
        policy.observe([Confidence(64, 1.0)] * 50, 50, DraftLedger())
    return policy


def drafter_of(policy: DraftPolicy, prompt: Any, **options: Any) -> PipelinedDrafter:
    memory = DraftMemory()
    memory.learn("", TEXT, [], 64)
    return PipelinedDrafter(policy, memory, "", prompt, **options)


def test_what_was_sent_is_taken_for_right_until_a_verdict_says_otherwise() -> None:
    made, at = drafter_of(policy_of(), TEXT[:40]), 40
    before, first = made.next(TEXT[:at], 500, ALONE, 0.08)
    assert before == 0
    assert np.array_equal(first, TEXT[at : at + len(first)])
    assert len(first) > 32  # more than a pass checks: the next is under way when its verdict comes
    made.checked(TEXT[at : at + 33], 32, 32, 0.07, ALONE)
    at += 33
    before, more = made.next(TEXT[:at], 467, ALONE, 0.08)
    assert before == len(first) - 33
    assert np.array_equal(more, TEXT[at + before : at + before + len(more)])
    made.checked(np.array([TEXT[at] + 1], "<i4"), 32, 0, 0.07, ALONE)
    history = np.append(TEXT[:at], TEXT[at] + 1).astype("<i4")
    before, after = made.next(history, 466, ALONE, 0.08)
    assert before == 0  # all that was drafted beyond is void
    assert not np.array_equal(after[:8], TEXT[at + 1 : at + 9]) or not len(after)
    assert (made.drafted, made.accepted) == (64, 32)


def test_a_longer_way_asks_for_longer_drafts() -> None:
    """By the time a draft is there the node has gone on by itself: only what is right beyond that saves anything."""
    policy = policy_of(0.003)
    sure, doubtful = [Confidence(64, 1.0)] * 32, [Confidence(4, 0.6)] * 32
    near, _ = policy.length(sure, ALONE, DraftLedger())
    far, _ = policy.length(sure[: near // 2], ALONE, DraftLedger(), ahead=near)
    assert near == 32
    assert far == 0  # it would come too late
    assert policy.length(sure, ALONE, DraftLedger(), ahead=8)[0] == 32
    here, _ = policy.length(doubtful, ALONE, DraftLedger())
    there, reason = policy.length(doubtful, ALONE, DraftLedger(), ahead=8)
    assert here > 0
    assert (there, reason) == (0, "cost")
    lengths = [len(drafter_of(policy, TEXT[:40]).next(TEXT[:40], 800, ALONE, rtt)[1]) for rtt in (0.005, 0.08, 0.4)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2]


def test_nothing_is_sent_where_it_is_not_wanted_not_known_or_too_late() -> None:
    assert not len(drafter_of(DraftPolicy(PassCosts()), TEXT[:40]).next(TEXT[:40], 99, ALONE, 0.01)[1])
    policy = policy_of()
    assert not len(drafter_of(policy, TEXT[:40], drafts=False).next(TEXT[:40], 99, ALONE, 0.01)[1])
    assert len(drafter_of(policy, TEXT[:40]).next(TEXT[:40], 5, ALONE, 0.01)[1]) == 5
    assert not len(drafter_of(policy, TEXT[:40]).next(TEXT[:40], 0, ALONE, 0.01)[1])
    assert not len(drafter_of(policy, TEXT[:40]).next(TEXT[:40], 500, ALONE, 60.0)[1])


def test_nothing_is_sent_behind_the_end_until_a_verdict_says_that_it_was_none() -> None:
    made = drafter_of(policy_of(), TEXT[:40], stops={int(TEXT[50])})
    assert made.next(TEXT[:40], 500, ALONE, 0.4)[1].tolist() == TEXT[40:51].tolist()
    assert made.next(TEXT[:40], 500, ALONE, 0.4)[1].tolist() == []
    came = np.append(TEXT[40:50], TEXT[100]).astype("<i4")
    made.checked(came, 11, 10, 0.05, ALONE)
    history = np.append(TEXT[:40], came).astype("<i4")
    before, again = made.next(np.append(history, TEXT[101:140]).astype("<i4"), 400, ALONE, 0.4)
    assert before == 0
    assert len(again)


@examples("light")
@given(data=st.data(), rtt=st.sampled_from([0.0, 0.02, 0.5]))
def test_positions_stay_in_step_with_the_node(data: st.DataObject, rtt: float) -> None:
    """A node that keeps what was sent behind what it has said agrees with each draft's place."""
    made, history = drafter_of(policy_of(), TEXT[:40]), TEXT[:40]
    under_way: list[int] = []
    for _ in range(12):
        before, sent = made.next(history, 300, ALONE, rtt)
        assert before == len(under_way)
        under_way += sent.tolist()
        assert len(under_way) <= 512
        right = data.draw(st.integers(0, min(len(under_way), 32)))
        came = [*under_way[:right], data.draw(st.sampled_from([7, int(TEXT[(len(history) + right) % 900])]))]
        agreed = came == under_way[: len(came)]
        under_way = under_way[len(came) :] if agreed else []
        history = np.array([*history, *came], "<i4")
        made.checked(np.array(came, "<i4"), max(right, 1), right, 0.05, ALONE)
    assert made.accepted <= made.drafted
