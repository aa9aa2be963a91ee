"""The policy of pauses: keeps the contract, knows sessions again by their paths, and lets go of who will stay away."""

from __future__ import annotations

from random import Random

from ctxreuse.pauses.hints import hint_label
from ctxreuse.pauses.kinds import CLOSED, END_OF_TURN, TOOL_CALL
from ctxreuse.store.policy import NativeShadow, Policy, Shadow
from ctxreuse.testing.policy import PolicyContract, traffic
from oracle.policy.lru import LRU
from oracle.policy.pauses import Pauses


class TestPauses(PolicyContract):
    def make(self) -> Policy[int]:
        return Pauses()


class TestFewSessions(PolicyContract):
    def make(self) -> Policy[int]:
        return Pauses(most=3)


def test_every_leaf_is_named_whatever_comes() -> None:
    policy: Pauses[int] = Pauses(most=7)
    shadow, rng = Shadow[int](policy, 60), Random(1)
    now = 0.0
    for path in traffic(600, seed=2):
        now += rng.expovariate(1.0)
        shadow.request(path, 1, 16, now)
        policy.check()
        if rng.random() < 0.7 and path:
            policy.on_pause(
                path[-1], rng.choice([0, TOOL_CALL, END_OF_TURN, CLOSED, *map(hint_label, ("pin", "demote"))]), now
            )
        policy.check()
    shadow.check()


def blocks(session: int, n: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(1000 * session + start, 1000 * session + n))


def taught(marks: bool = True) -> tuple[Pauses[int], Shadow[int], float]:
    """Sessions of the past: tools took two seconds, people an hour."""
    policy: Pauses[int] = Pauses()
    shadow = Shadow[int](policy, 100)
    now = 0.0
    for session in range(100, 130):
        for turn in range(1, 4):
            for label, pause in ((TOOL_CALL, 2.0), (END_OF_TURN, 3600.0)):
                path = blocks(session, 4 * turn + (label == END_OF_TURN))
                shadow.request(path, 1, 16, now)
                if marks:
                    policy.on_pause(path[-1], label, now + 1.0)
                now += 1.0 + pause
        policy.on_pause(blocks(session, 13)[-1], CLOSED, now)
    return policy, shadow, now


def test_who_waits_for_a_person_goes_before_who_waits_for_a_tool() -> None:
    policy, shadow, now = taught()
    shadow.request(blocks(1, 40), 1, 16, now)
    policy.on_pause(blocks(1, 40)[-1], TOOL_CALL, now + 1)
    shadow.request(blocks(2, 40), 1, 16, now + 1)
    policy.on_pause(blocks(2, 40)[-1], END_OF_TURN, now + 2)
    shadow.request(blocks(3, 40), 1, 16, now + 2)
    assert shadow.match(blocks(1, 40)) == 40  # the oldest by use, and LRU's victim
    assert shadow.match(blocks(2, 40)) == 20


def test_closing_makes_room_first_and_a_pin_holds_no_longer_than_it_lasts() -> None:
    policy, shadow, now = taught()
    for session, label in ((1, CLOSED), (2, END_OF_TURN)):
        shadow.request(blocks(session, 40), 1, 16, now)
        policy.on_pause(blocks(session, 40)[-1], label, now + 1)
    shadow.request(blocks(3, 40), 1, 16, now + 2)
    assert (shadow.match(blocks(1, 40)), shadow.match(blocks(2, 40))) == (20, 40)
    policy.on_pause(blocks(2, 40)[-1], hint_label("pin"), now + 2)
    policy.on_pause(blocks(3, 40)[-1], END_OF_TURN, now + 2)
    shadow.request(blocks(4, 40), 1, 16, now + 3)
    assert shadow.match(blocks(2, 40)) == 40
    policy.on_pause(blocks(4, 40)[-1], END_OF_TURN, now + 3)
    # Three hours later the pin is gone: room is found all the same, and also if everything is pinned.
    for session in range(5, 9):
        shadow.request(blocks(session, 90), 1, 16, now + 10_000 * session)
        policy.on_pause(blocks(session, 90)[-1], hint_label("pin"), now + 10_000 * session)
        assert shadow.match(blocks(session, 90)) == 90
        assert shadow.match(blocks(2, 40)) < 40


def test_what_a_turn_left_behind_goes_first() -> None:
    policy: Pauses[int] = Pauses()
    shadow = Shadow[int](policy, 100)
    shadow.request(blocks(1, 50), 1, 16, 0.0)
    shadow.request(blocks(2, 30), 1, 16, 1.0)
    again = (*blocks(1, 46), *range(5000, 5005))  # most of the path is the session's: the same turn, written anew
    shadow.request(again, 1, 16, 2.0)
    shadow.request(blocks(3, 16), 1, 16, 3.0)
    assert shadow.match(blocks(1, 50)) == 49
    shadow.check()
    policy.check()


def test_a_beginning_that_is_asked_for_leaves_nothing_behind() -> None:
    policy: Pauses[int] = Pauses()
    shadows = Shadow[int](policy, 100), NativeShadow[int]("pauses", 100)
    for shadow in shadows:
        for now in range(3):
            shadow.request(blocks(1, 50), 1, 16, 3.0 * now)
            shadow.request(blocks(1, 46), 1, 16, 3.0 * now + 1)  # part of it, such as a client with less room fetches
        shadow.request(blocks(2, 50), 1, 16, 8.0)
        shadow.request(blocks(1, 46), 1, 16, 8.5)
        shadow.request(blocks(3, 20), 1, 16, 9.0)
        assert shadow.match(blocks(1, 50)) == 50
        shadow.check()
    policy.check()


def test_a_shared_beginning_outlives_the_worse_session() -> None:
    policy, shadow, now = taught()
    common = blocks(1, 20)
    for session, label in ((2, END_OF_TURN), (3, TOOL_CALL)):
        path = (*common, *blocks(session, 20))
        shadow.request(path, 1, 16, now)
        policy.on_pause(path[-1], label, now + 1)
    shadow.request(blocks(4, 60), 1, 16, now + 2)
    assert shadow.match((*common, *blocks(3, 20))) == 40
    assert shadow.match((*common, *blocks(2, 20))) == 20


def test_better_than_lru_where_pauses_have_kinds_and_no_worse_knowledge_without() -> None:
    def hits(policy: Policy[int], marks: bool) -> int:
        shadow, rng = Shadow[int](policy, 400), Random(9)
        coming = sorted((rng.uniform(0, 20), session, 1) for session in range(30))
        found = 0
        for _ in range(2500):
            now, session, turn = coming.pop(0)
            path = blocks(session, min(900, 20 + turn))
            found += shadow.request(path, 1, 16, now).blocks
            tool = rng.random() < 0.8
            if marks:
                policy.on_pause(path[-1], TOOL_CALL if tool else END_OF_TURN, now + 0.5)
            coming.append((now + 0.5 + rng.expovariate(1 / 20 if tool else 1 / 400), session, turn + 1))
            coming.sort()
        return found

    plain, unmarked, ours = hits(LRU(), False), hits(Pauses(), False), hits(Pauses(), True)
    assert ours > 1.08 * plain
    assert unmarked > 0.95 * plain


def test_quick_tools_are_told_from_the_end_of_a_request_where_prompts_are_told_of() -> None:
    policy: Pauses[int] = Pauses()
    shadow = Shadow[int](policy, 100)
    now = 0.0
    for turn in range(1, 30):
        for session, kind in ((1, TOOL_CALL), (2, END_OF_TURN)):
            path = blocks(session, 20 + turn)
            policy.on_lookup(path, [1] * len(path), [16] * len(path), now)
            shadow.request(path, 1, 16, now)
            policy.on_pause(path[-1], kind, now + 0.05)
            shadow.request(path, 1, 16, now + 0.06)  # its last blocks were stored
            policy.check()
            now += 0.1
    shadow.request(blocks(3, 60), 1, 16, now)
    held = shadow.match(blocks(1, 49)), shadow.match(blocks(2, 49))
    assert sum(held) >= 98, "who comes back in a tenth of a second stays, and the newcomer does not"
