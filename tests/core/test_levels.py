"""Names of levels: what they promise, who may read them, which of two is kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.block.levels import (
    EXACT,
    PACKED,
    allowed_by,
    approx,
    check_limit,
    check_lossy,
    expected_kl,
    family,
    is_exact,
    is_raw,
    limit_name,
    limit_of,
    quality_key,
    read_limit,
    stricter,
)
from ctxreuse.errors import ConfigError

CARD = "@0123456789abcdef"
LADDER = (EXACT, "kl-0.002", f"kl-0.01{CARD}", "approx~kl-0.01", f"kl-0.05{CARD}", "approx~kl-0.05", "approx")


def test_damage_is_what_the_name_says() -> None:
    assert [expected_kl(level) for level in (EXACT, PACKED, f"kl-0.01{CARD}", "kl-1", "approx~kl-0.05")] == [
        0.0, 0.0, 0.01, 1.0, 0.05,
    ]  # fmt: skip
    for nothing in ("approx", f"kl-0.05>kl-0.01{CARD}", "q8", "", "kl-", "kl-1e-3", "kl-0.01@card", "approx~exact"):
        assert expected_kl(nothing) == math.inf


def test_a_permission_reaches_as_far_as_it_says() -> None:
    for i, level in enumerate(LADDER):
        assert allowed_by(level, None) is (level == EXACT)
        for j, allowed in enumerate((0.002, 0.01, 0.05)):
            assert allowed_by(level, allowed) is (i <= (1, 3, 5)[j])
        assert allowed_by(level, 0.0) is allowed_by(level, None)
    assert allowed_by(PACKED, None)


def test_ranks_order_what_is_kept() -> None:
    assert sorted(sorted(LADDER), key=quality_key) == list(LADDER)
    assert quality_key(EXACT) == quality_key(PACKED)
    assert quality_key("kl-0.01") == quality_key(f"kl-0.01{CARD}")


def test_names_without_their_cards() -> None:
    assert [family(level) for level in LADDER] == [
        EXACT, "kl-0.002", "kl-0.01", "approx", "kl-0.05", "approx", "approx",
    ]  # fmt: skip
    assert [is_raw(level) for level in (EXACT, PACKED, "kl-0.01", "approx~kl-0.01")] == [True, False, False, True]
    assert [is_exact(level) for level in (EXACT, PACKED, "kl-0.01", "approx")] == [True, True, False, False]
    assert approx(f"kl-0.01{CARD}") == approx("approx~kl-0.01") == "approx~kl-0.01"


def test_of_two_permissions_the_stricter_counts() -> None:
    assert stricter(None, 0.01) is stricter(0.01, None) is None
    assert stricter(0.01, 0.05) == stricter(0.05, 0.01) == 0.01


def test_what_is_no_permission_is_refused() -> None:
    assert check_lossy("kl-0.01") == "kl-0.01"
    for wrong in (EXACT, PACKED, "", "q4", f"kl-0.01{CARD}", "approx~kl-0.01", "kl-0.05>kl-0.01"):
        with pytest.raises(ConfigError, match="no such lossy level"):
            check_lossy(wrong)


@given(st.floats(0.000001, 9999).map(lambda kl: round(kl, 6)))
def test_a_limit_is_stored_as_the_name_of_the_level_that_just_meets_it(max_kl: float) -> None:
    assert check_limit(max_kl) == max_kl
    assert check_lossy(limit_name(max_kl)) == limit_name(max_kl)
    assert limit_of(limit_name(max_kl)) == max_kl
    assert allowed_by(limit_name(max_kl), max_kl)


def test_limits_in_words() -> None:
    assert [limit_name(kl) for kl in (None, 0.0, 0.01, 0.05, 2.0, 100.0)] == [
        "",
        "",
        "kl-0.01",
        "kl-0.05",
        "kl-2",
        "kl-100",
    ]
    assert [limit_of(name) for name in (None, "", EXACT, "kl-0.010", "q4", "approx", "kl-0")] == [None] * 3 + [0.01] + [
        None
    ] * 3
    assert check_limit(0.0) is check_limit(None) is None
    for wrong in (-0.1, math.nan, math.inf, 1e5):
        with pytest.raises(ConfigError, match="max_kl"):
            check_limit(wrong)


def test_levels_as_limits_are_read_with_a_warning() -> None:
    for text, limit in (("kl-0.01", 0.01), (EXACT, None)):
        with pytest.warns(DeprecationWarning, match="is now the number"):
            assert read_limit(text) == limit
    with pytest.raises(ConfigError, match="no such lossy level"):
        read_limit("q4")
    assert read_limit(0.05) == 0.05
