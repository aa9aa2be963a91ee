"""Levels as further ways: the least predicted seconds win, less damage where it costs next to nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.block.levels import EXACT, PACKED, expected_kl
from ctxreuse.cost import CostModel, Decision, FetchPath
from ctxreuse.cost.levels import JOINT_WORK, work_of
from support.examples import examples

CARD = "@0123456789abcdef"
RAW = 23_040.0
LEVELS = (
    (PACKED, 0.68 * RAW, 0.0),
    (f"kl-0.002{CARD}", 0.19 * RAW, 0.0),
    (f"kl-0.01{CARD}", 0.13 * RAW, 0.0),
    (f"kl-0.05{CARD}", 0.07 * RAW, 0.0),
)


def taught(decode: float = 2e9) -> CostModel:
    """550 tokens a second; decoding at ``decode`` raw bytes a second."""
    model = CostModel()
    for n in (16, 64, 256, 512, 2048):
        model.prefill.observe(n, 0, 0.004 + n / 550)
    for name, *_ in LEVELS:
        for nbytes in (1_000_000, 20_000_000):
            model.unpack.observe(name, nbytes, nbytes / decode)
    return model


def choose(
    model: CostModel, bandwidth: float, levels: tuple[tuple[str, float, float], ...] = LEVELS, **more: float
) -> Decision:
    path = FetchPath(RAW, bandwidth, more.pop("rtt", 0.02), more.pop("delay", 0.0), levels=levels)
    return model.choose(0, 2048, 2080, path, 30)


MODEL = taught()


@examples("light")
@given(bandwidth=st.floats(1e4, 1e9), rtt=st.floats(0.0, 0.3), count=st.integers(0, len(LEVELS)))
def test_more_levels_never_make_it_slower_and_fixed_ones_are_hardly_quicker(
    bandwidth: float, rtt: float, count: int
) -> None:
    allowed = LEVELS[:count]
    free = choose(MODEL, bandwidth, allowed, rtt=rtt)
    fixed = [choose(MODEL, bandwidth, (), rtt=rtt)] + [choose(MODEL, bandwidth, (one,), rtt=rtt) for one in allowed]
    assert free.predicted is not None
    # What a level is taken to risk (a tenth of its transfer) is not predicted seconds; no other difference may be.
    assert free.predicted <= min(one.predicted or 0.0 for one in fixed) * 1.05 + 0.1 * free.within
    assert free.predicted <= choose(MODEL, bandwidth, (), rtt=rtt).ways["recompute"] * 1.0001
    assert free.level in {EXACT, *(name for name, *_ in allowed)}
    assert free.tokens <= 2048
    if free.way != "recompute":
        assert 0 < free.within <= free.predicted * 1.04


def test_a_slower_link_is_met_with_a_coarser_level() -> None:
    found = [choose(MODEL, bandwidth) for bandwidth in (2.5e6, 1.25e8, 1e11)]
    damages = [expected_kl(one.level) for one in found]
    assert damages == sorted(damages, reverse=True)
    assert found[0].level == f"kl-0.05{CARD}"
    assert damages[-1] == 0.0, "where the link costs nothing, nothing is lost for it"


def test_at_20_megabits_a_lossy_level_takes_a_third_of_exact() -> None:
    exact, lossy = choose(MODEL, 2.5e6, ()), choose(MODEL, 2.5e6)
    assert exact.predicted is not None
    assert lossy.predicted is not None
    assert RAW * 2048 / 2.5e6 / lossy.predicted > 3  # of a plain fetch; the model chooses better than that by itself
    assert exact.predicted / lossy.predicted > 2


def test_a_level_that_takes_long_to_decode_is_not_chosen() -> None:
    slow = taught(decode=1e6)
    assert choose(slow, 1.25e8).level == EXACT
    assert choose(slow, 1e4).way == "recompute"


def test_a_level_that_takes_the_peer_long_to_encode_is_not_chosen() -> None:
    slow = tuple((name, nbytes, 0.01) for name, nbytes, _ in LEVELS)
    assert choose(MODEL, 1.25e8, slow).level == EXACT
    hidden = tuple((name, nbytes, nbytes / 3e6) for name, nbytes, _ in LEVELS)
    assert choose(MODEL, 2.5e6, hidden).predicted == pytest.approx(choose(MODEL, 2.5e6).predicted or 0.0, rel=0.2)
    quick = tuple((name, nbytes, 1e-5) for name, nbytes, _ in LEVELS)
    assert choose(MODEL, 1.25e8, quick).predicted == pytest.approx(
        choose(MODEL, 1.25e8).predicted or 0.0, abs=2048 * 1e-5 + 0.01
    )


def test_of_an_unknown_link_the_smallest_level_is_tried() -> None:
    assert choose(MODEL, 0.0).level == f"kl-0.05{CARD}"
    assert choose(MODEL, 0.0, ()).level == EXACT
    assert CostModel().choose(0, 2048, 2080, FetchPath(RAW, 1e6, levels=LEVELS), 30).predicted is None


def test_a_cloud_that_computes_sends_levels_too() -> None:
    path = FetchPath(RAW, 2.5e6, 0.02, 0.1, computes=True, levels=LEVELS)
    found = MODEL.choose(0, 2048, 2080, path, 30)
    assert (found.way, found.level) == ("layers", f"kl-0.05{CARD}")
    assert "tail" not in found.ways


def test_seconds_of_decoding_come_from_what_was_seen() -> None:
    model = CostModel()
    assert model.unpack.seconds("kl-0.01", 1_000_000) == pytest.approx(0.001)
    model.unpack.observe(f"kl-0.01{CARD}", 1_000_000, 0.5)
    model.unpack.observe(f"kl-0.01{CARD}", 2_000_000, 1.0)
    assert model.unpack.seconds("kl-0.01@fedcba9876543210", 4_000_000) == pytest.approx(2.0, rel=0.05)
    assert model.unpack.seconds("kl-0.05", 4_000_000) == pytest.approx(2.0, rel=0.05), "as slow as the slowest known"


def test_joint_levels_are_for_slow_links_and_slower_to_decode_until_they_were_seen() -> None:
    model = taught(decode=1e9)
    assert model.unpack.seconds("kl-0.05-joint", 10_000_000) == pytest.approx(JOINT_WORK * 0.01, rel=0.05)
    levels = (*LEVELS, (f"kl-0.05-joint{CARD}", 0.03 * RAW, 0.0))
    assert choose(model, 2.5e5, levels).level == f"kl-0.05-joint{CARD}"
    assert choose(model, 2.5e7, levels).level != f"kl-0.05-joint{CARD}"
    for nbytes in (1_000_000, 20_000_000):
        model.unpack.observe(f"kl-0.05-joint{CARD}", nbytes, nbytes / 4e9)
    assert model.unpack.seconds("kl-0.01-joint", 10_000_000) == pytest.approx(0.0025, rel=0.1)
    assert model.unpack.seconds("kl-0.03", 10_000_000) == pytest.approx(0.01, rel=0.05)


def test_levels_by_how_they_are_coded() -> None:
    names = (PACKED, "kl-0.05", f"kl-0.05{CARD}", "kl-0.05-joint", f"kl-0.05-joint{CARD}")
    assert [work_of(name) for name in names] == ["packed", "lossy", "lossy", "joint", "joint"]
