"""The policy that says what shrinks: packed before lossy, cold before hot, and never further than an owner allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.block.levels import EXACT, PACKED, allowed_by, is_exact, limit_of, quality_key
from ctxreuse.store.policy.recompress import Candidate, Step, choose, smaller_levels

LEVELS = (EXACT, PACKED, "kl-0.01@0123456789abcdef", "kl-0.05", "approx~kl-0.05")
RATIOS = {EXACT: 1.0, PACKED: 0.75, "kl-0.01": 0.1, "kl-0.05": 0.05}

candidates = st.lists(
    st.builds(
        Candidate,
        st.sampled_from(["block", "state"]),
        st.binary(min_size=1, max_size=4),
        st.sampled_from(LEVELS),
        st.integers(1, 100_000),
        st.sampled_from(["", "kl-0.01", "kl-0.05", "kl-0.2"]),
        st.sampled_from([(), (PACKED,), ("kl-0.05",), (PACKED, "kl-0.05")]),
    ),
    max_size=30,
    unique_by=lambda candidate: candidate[:2],
)


def freed(steps: list[Step]) -> int:
    return sum(step.frees for step in steps)


@given(candidates, st.integers(0, 2_000_000), st.integers(0, 500_000))
def test_steps_lead_down_and_no_further_than_allowed(held: list[Candidate], need: int, spared: int) -> None:
    steps = list(choose(held, need, spared, RATIOS.get))
    assert len({step.candidate[:2] for step in steps}) == len(steps)
    for step in steps:
        candidate = step.candidate
        assert candidate in held
        assert is_exact(candidate.level)
        assert quality_key(step.to) >= quality_key(candidate.level)
        assert step.to == PACKED or allowed_by(step.to, limit_of(candidate.lossy))
        assert step.to in smaller_levels(candidate)
        assert step.to not in candidate.stiff
        assert 0 < step.frees < candidate.nbytes


@given(candidates, st.integers(1, 2_000_000), st.integers(0, 500_000))
def test_all_that_can_be_packed_is_before_anything_is_lossy(held: list[Candidate], need: int, spared: int) -> None:
    steps = list(choose(held, need, spared, RATIOS.get))
    shrunk = {step.candidate[:2] for step in steps}
    if any(not is_exact(step.to) for step in steps):
        for candidate in held:
            if PACKED in smaller_levels(candidate) and int(candidate.nbytes * 0.25) > 0:
                assert candidate[:2] in shrunk
    # The most recently used stay what they are: behind a lossy one there is at least what is to be spared.
    for step in steps:
        if not is_exact(step.to):
            behind = held[held.index(step.candidate) + 1 :]
            assert sum(candidate.nbytes for candidate in behind) >= spared


@given(candidates, st.integers(1, 2_000_000))
def test_enough_is_found_if_there_is_enough_and_no_more_than_that(held: list[Candidate], need: int) -> None:
    everything = freed(list(choose(held, 1 << 60, 0, RATIOS.get)))
    steps = list(choose(held, need, 0, RATIOS.get))
    assert freed(steps) >= min(need, everything)
    if steps and freed(steps) >= need:
        last = max(step.frees for step in steps)
        assert freed(steps) - last < need


@given(candidates)
def test_nothing_is_done_for_nothing(held: list[Candidate]) -> None:
    assert not choose(held, 0, 0, RATIOS.get)
    assert not choose(held, 100, 0, lambda _: None)


def test_the_coldest_go_first() -> None:
    held = [Candidate("block", bytes([i]), EXACT, 1000, "kl-0.05") for i in range(8)]
    one = list(choose(held, 500, 0, RATIOS.get))
    assert [(step.candidate.key[0], step.to) for step in one] == [(0, PACKED), (1, PACKED)]
    more = list(choose(held, 3000, 2000, RATIOS.get))
    assert [step.to for step in more] == ["kl-0.05"] * 2 + [PACKED] * 6
