"""Whom the adaptive policy follows: changes that would have paid, none on a loop, and a memory that is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from ctxreuse.store.policy import NativeShadow, Shadow, make_policy
from ctxreuse.store.policy.greedy import GreedyRule, LeadingHits

ROOM = 100


def rule_after(prompts: Sequence[tuple[list[int], list[int], int]]) -> GreedyRule:
    """A rule that began with the first expert. Prompts: keys, what each expert and what the real cache served."""
    rule = GreedyRule(2, 0)
    for path, served, real in prompts:
        rule.note(path, [LeadingHits(one, one) for one in served], LeadingHits(real, real))
        best = rule.choose(1.0, ROOM, ROOM)
        if best != rule.followed:
            rule.follow(best)
    return rule


@pytest.mark.parametrize("capacity", [500, 1500, 2000])
def test_experts_that_take_turns_on_a_loop_are_not_followed_in_turn(capacity: int) -> None:
    loop = [tuple(range(4 * document, 4 * document + 4)) for document in range(550)] * 9
    single = {name: NativeShadow[int](name, capacity) for name in ("hazard", "pauses")}
    hits = {
        name: sum(shadow.request(path, 1, 1, now).blocks for now, path in enumerate(loop))
        for name, shadow in single.items()
    }
    cache = Shadow(make_policy("adaptive:hazard,pauses", capacity, rng=Random(0)), capacity)
    real = sum(cache.request(path, 1, 1, now).blocks for now, path in enumerate(loop))
    assert real >= max(hits.values()) - 0.01 * sum(map(len, loop))  # where they took turns: 0.1


def test_the_first_hits_of_what_the_cache_lacks_are_no_gain() -> None:
    once = [([key], [0, 1], 0) for key in range(1_000)]
    assert rule_after(once).followed == 0
    assert rule_after([*once, *once]).followed == 1


def test_hits_that_the_real_cache_has_too_are_gain() -> None:
    assert rule_after([([key], [0, 1], 1) for key in range(30)]).followed == 1


def test_what_the_real_cache_evicted_since_counts_as_gain() -> None:
    rule = GreedyRule(2, 0)
    for key in range(30):
        rule.on_evict(key)
    for key in range(30):
        rule.note([key], [LeadingHits(0, 0), LeadingHits(1, 1)], LeadingHits(0, 0))
    assert rule.choose(1.0, ROOM, ROOM) == 1


def test_a_lead_is_given_back_when_the_other_would_have_served_more() -> None:
    ahead = [([0], [0, 1], 1)] * 30
    behind = [([0], [1, 0], 1)] * 200
    assert rule_after(ahead).followed == 1
    assert rule_after([*ahead, *behind]).followed == 0


def test_a_sample_tells_what_all_blocks_would() -> None:
    rule, blocks = GreedyRule(2, 0), 1 << 17
    for start in range(0, blocks, 64):
        rule.note(range(start, start + 64), [LeadingHits(0, 0), LeadingHits(64, 64)], LeadingHits(0, 0))
        assert rule.choose(1.0, blocks, blocks) == 0
    assert rule._bits == 5
    assert blocks / 64 < len(rule._last) <= 1 << 14
    assert abs(rule._gains[1]) < 0.02 * blocks
