"""The simulated memory of paused sessions: counts by hand, limits under any rule, and who is better than whom."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pausing import Memory, Outcome, Rule, Turn, simulate, turns_of
from benchmarks.rules import Discard, Elapsed, Lru, Oracle, Ours, Preserve, Swap, TailLru, TimeToLive, kind_of
from ctxreuse.lab.replay import Line
from ctxreuse.lab.trace import END_OF_TURN, TOOL_CALL, Request
from support.examples import examples

RULES: dict[str, Callable[[], Rule]] = {
    "lru": Lru,
    "discard": Discard,
    "preserve": Preserve,
    "swap": lambda: Swap(50.0),
    "elapsed": Elapsed,
    "ttl": lambda: TimeToLive(0.03),
    "tail_lru": lambda: TailLru(5),
    "oracle": Oracle,
    "ours": Ours,
    "ours_close": lambda: Ours(hints=True),
}


def request(t: float, session: int, blocks: int, stop: int = TOOL_CALL, busy: float = 1.0, branch: int = 0) -> Request:
    path = np.arange(blocks, dtype=np.int64) + (session << 32)
    if branch:
        path[-branch:] += 1 << 20
    return Request(t, path, 64 * blocks, session, 0, stop, 0, busy, 0.0, 4 if stop == TOOL_CALL else 1)


def run(turns: list[Turn], rule: str, capacity: int) -> Outcome:
    return simulate(turns, RULES[rule](), capacity, block_gb=1.0, line=Line(1.0, 0.0))


def traffic(seed: int = 0, sessions: int = 30) -> list[Turn]:
    """Tools take seconds, people minutes; 12 turns a session."""
    rng, made = np.random.default_rng(seed), []
    for session in range(sessions):
        now, blocks = float(rng.uniform(0, 300)), int(rng.integers(20, 60))
        for _ in range(12):
            tool = rng.random() < 0.8
            made.append(request(now, session, blocks, TOOL_CALL if tool else END_OF_TURN))
            now += 1.0 + float(rng.exponential(8.0 if tool else 600.0))
            blocks += int(rng.integers(0, 6))
    return turns_of(sorted(made, key=lambda one: one.t))


def test_counts_by_hand() -> None:
    turns = turns_of([request(0, 1, 4), request(10, 2, 4), request(20, 1, 5), request(30, 2, 6, branch=3)])
    assert [(turn.shared, turn.after, turn.last) for turn in turns] == [
        (0, 20, False),
        (0, 30, False),
        (4, float("inf"), True),
        (3, float("inf"), True),
    ]
    outcome = run(turns, "lru", 100)
    assert outcome.hits.tolist() == [0, 0, 4, 3]
    assert outcome.share() == 7 / 19
    assert outcome.share(2) == 3 / 10
    # Until the end at 30: the block that session 2 left behind since 10, five blocks of session 1 since 20.
    assert outcome.idle_gbs == 1 * 20 + 5 * 10
    # Seconds times the whole context, for each turn's missing blocks of 64 tokens.
    assert outcome.recompute_gbs == 64 * (4 * 4 + 4 * 4 + 1 * 5 + 3 * 6)
    assert run(turns, "discard", 100).hits.sum() == 0
    small = run(turns, "lru", 6)
    assert small.hits.tolist() == [0, 0, 2, 1]


@examples("normal")
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1000),
            st.integers(0, 5),
            st.integers(1, 30),
            st.sampled_from((0, TOOL_CALL, END_OF_TURN)),
            st.floats(0, 300),
            st.integers(0, 1),
        ),
        max_size=40,
    ),
    st.integers(1, 60),
    st.sampled_from(sorted(RULES)),
)
def test_any_traffic(rows: list[tuple[float, int, int, int, float, int]], capacity: int, rule: str) -> None:
    turns = turns_of([request(*row) for row in sorted(rows)])
    outcome = run(turns, rule, capacity)  # it checks its counts at the end
    assert (outcome.hits <= outcome.blocks).all()
    assert (outcome.hits <= capacity).all()
    assert outcome.idle_gbs >= 0
    assert outcome.recompute_gbs >= 0


def test_nobody_beats_room_for_all_or_the_oracle() -> None:
    turns = traffic()
    everything = run(turns, "lru", 10_000).share()
    for capacity in (100, 300, 800):
        shares = {rule: run(turns, rule, capacity).share() for rule in RULES}
        assert all(share <= everything for share in shares.values())
        assert max(shares, key=lambda rule: shares[rule]) == "oracle"
        assert shares["discard"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_ours_learns_who_will_be_away(seed: int) -> None:
    turns = traffic(seed, 40)
    lru, ours, close = (run(turns, rule, 250) for rule in ("lru", "ours", "ours_close"))
    assert ours.share() > lru.share() + 0.03
    assert close.share() > ours.share() - 0.02
    assert ours.waste_gbs < lru.waste_gbs


def test_what_rules_say() -> None:
    assert kind_of(turns_of([request(0, 1, 3)])[0]).stop == "tool"
    memory, turn = Memory(5, 1.0), turns_of([request(0, 1, 8)])[0]
    assert memory.hit(turn) == 0
    memory.fit(Lru(), turn)
    memory.check()
    assert memory.held[1].blocks == 5, "the end of what came is left out where nothing else can go"
