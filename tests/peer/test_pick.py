"""Picking levels in told time: no deadline is missed that could be kept, no damage is done that was not needed."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctxreuse.block.levels import EXACT, PACKED, expected_kl
from ctxreuse.peer.serve.pick import Candidate, Picker
from support.examples import examples

CARD = "@0123456789abcdef"
SIZES = {EXACT: 1.5e6, PACKED: 1.0e6, f"kl-0.002{CARD}": 2.5e5, f"kl-0.01{CARD}": 1.8e5, f"kl-0.05{CARD}": 9e4}


def candidates(coder: float = 0.0, sizes: dict[str, float] | None = None) -> list[Candidate]:
    return [Candidate(name, size, 0.0 if name == EXACT else coder) for name, size in (sizes or SIZES).items()]


def carried(picker: Picker, blocks: int, bandwidth: float, coder: float = 0.0) -> tuple[float, list[str]]:
    """Seconds until a link of constant bandwidth has brought all blocks, and their levels. A block is picked when the
    one before is through the encoder; encoder and link work side by side."""
    encoded = through = 0.0
    levels = []
    for i in range(blocks):
        level = picker.pick(blocks - i, encoded)
        picker.check()
        levels.append(level)
        encoded += 0.0 if level == EXACT else coder
        through = max(through, encoded) + SIZES[level] / bandwidth
        encoded = max(encoded, through - 2 * SIZES[level] / bandwidth)  # two blocks ahead of the link, no more
    return through, levels


links = st.floats(1e5, 1e9)
deadlines = st.floats(0.01, 60.0)


@examples("light")
@given(bandwidth=links, deadline=deadlines, blocks=st.integers(1, 64))
@example(bandwidth=5e8, deadline=0.01, blocks=20)  # kept to the last moment: twenty blocks of kl-0.002 take .01 s
def test_a_deadline_that_can_be_kept_is_kept(bandwidth: float, deadline: float, blocks: int) -> None:
    picker = Picker(candidates(), bandwidth=bandwidth, deadline=deadline, now=0.0)
    seconds, levels = carried(picker, blocks, bandwidth)
    fixed = {name: blocks * size / bandwidth for name, size in SIZES.items()}
    if min(fixed.values()) <= deadline:
        assert seconds <= deadline * (1 + 1e-9)
        # And nobody who sends all blocks at one level in time does less damage.
        allowed = [name for name, took in fixed.items() if took <= deadline]
        assert max(map(expected_kl, levels)) <= min(map(expected_kl, allowed)) + 1e-12
    else:
        assert set(levels) == {min(fixed, key=fixed.__getitem__)}
        assert seconds == pytest.approx(min(fixed.values()))


@examples("normal")
@given(
    before=links,
    after=links,
    deadline=deadlines,
    blocks=st.integers(2, 64),
    coder=st.floats(0.0, 0.05),
    at=st.floats(0, 1),
)
def test_a_link_that_changes_is_followed_from_the_next_block_on(
    before: float, after: float, deadline: float, blocks: int, coder: float, at: float
) -> None:
    picker = Picker(candidates(coder), bandwidth=before, deadline=deadline, now=0.0)
    change, now = int(at * (blocks - 1)), 0.0
    for i in range(blocks):
        if i == change:
            picker.on_bandwidth(after, now)
        level = picker.pick(blocks - i, now)
        bandwidth = after if i >= change else before
        each = {name: max(size / bandwidth, 0 if name == EXACT else coder) for name, size in SIZES.items()}
        if i >= change and now + (blocks - i) * min(each.values()) > deadline:
            # Late whatever happens, so nothing is waited for that is larger than need be.
            assert each[level] == min(each.values())
        now += each[level]
        picker.check()


def test_packed_wherever_the_link_is_slower_than_the_coder() -> None:
    """A block of 1.5 MB packs in 1 ms to 1 MB: worth it below 1.5 GB/s."""
    for bandwidth, level in ((1e6, PACKED), (1e8, PACKED), (1.4e9, PACKED), (2e9, EXACT), (1e12, EXACT)):
        sizes = {EXACT: SIZES[EXACT], PACKED: SIZES[PACKED]}
        picker = Picker(candidates(0.001, sizes), bandwidth=bandwidth, deadline=0.0, now=0.0)
        assert picker.pick(10, 0.0) == level


def test_of_an_unknown_link_the_smallest_is_picked_until_it_is_known() -> None:
    picker = Picker(candidates(), bandwidth=0.0, deadline=5.0, now=0.0)
    assert picker.pick(10, 0.0) == f"kl-0.05{CARD}"
    picker.on_bandwidth(1e9, 0.1)
    assert expected_kl(picker.pick(9, 0.1)) == 0.0


def test_blocks_that_nobody_counted_on_come_as_soon_as_they_can() -> None:
    picker = Picker(candidates(), bandwidth=1e8, deadline=60.0, now=0.0)
    assert expected_kl(picker.pick(2, 0.0)) == expected_kl(picker.pick(1, 0.0)) == 0.0
    assert picker.pick(0, 0.0) == picker.pick(-1, 0.0) == f"kl-0.05{CARD}"


def test_without_a_hurry_nothing_lossy_goes_out() -> None:
    picker = Picker(candidates(), bandwidth=1e4, deadline=0.0, now=0.0)
    assert {picker.pick(10 - i, float(i)) for i in range(10)} == {PACKED}


def test_what_blocks_really_take_counts() -> None:
    """All levels turn out twice as large: what would have fitted does not any more."""
    picker = Picker(candidates(), bandwidth=1e6, deadline=10.0, now=0.0)
    level = picker.pick(40, 0.0)
    assert level == f"kl-0.002{CARD}"
    for _ in range(12):
        picker.made(level, int(2 * SIZES[level]), 0.0)
        picker.check()
    assert expected_kl(picker.pick(39, 0.0)) > expected_kl(level)
    sizes = [one.nbytes for one in picker.candidates[2:]]
    assert sizes == sorted(sizes, reverse=True), "a finer level is never expected to be the smaller one"


def test_there_must_be_something_to_pick_from() -> None:
    with pytest.raises(ValueError, match="no level"):
        Picker([], bandwidth=1.0, deadline=1.0, now=0.0)


@examples("light")
@given(bandwidth=links, deadline=deadlines, blocks=st.integers(1, 64), coder=st.floats(1e-5, 0.1))
def test_where_all_is_encoded_first_the_deadline_holds_encoding_and_link_one_after_the_other(
    bandwidth: float, deadline: float, blocks: int, coder: float
) -> None:
    picker = Picker(candidates(coder), bandwidth=bandwidth, deadline=deadline, now=0.0, serial=True)
    encoded = nbytes = 0.0
    for i in range(blocks):
        level = picker.pick(blocks - i, encoded)
        picker.check()
        encoded += 0.0 if level == EXACT else coder
        nbytes += SIZES[level]
    fixed = {name: blocks * ((name != EXACT) * coder + size / bandwidth) for name, size in SIZES.items()}
    if min(fixed.values()) <= deadline:
        assert encoded + nbytes / bandwidth <= deadline * (1 + 1e-9)


@pytest.mark.parametrize("serial", [False, True])
def test_nothing_finer_than_the_receiver_priced_is_sent_unless_it_is_the_quickest(serial: bool) -> None:
    given = {"bandwidth": 1e8, "now": 0.0, "serial": serial, "finest": 0.01}
    assert Picker(candidates(1e-4), deadline=1e4, **given).pick(8, 0.0) == f"kl-0.01{CARD}"  # type: ignore[arg-type]
    assert Picker(candidates(10.0), deadline=1e-3, **given).pick(8, 0.0) == EXACT  # type: ignore[arg-type]
    assert Picker(candidates(1e-4), deadline=1e-3, **given).pick(8, 0.0) == f"kl-0.05{CARD}"  # type: ignore[arg-type]
