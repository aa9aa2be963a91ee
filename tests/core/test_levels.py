"""Names of levels: what they promise, who may read them, which of two is kept."""

from __future__ import annotations

import math

import pytest

from ctxreuse.errors import ConfigError
from ctxreuse.levels import EXACT, PACKED, approx, check_lossy, damage, fits, is_exact, is_raw, rank, short, worst

CARD = "@0123456789abcdef"
LADDER = (EXACT, "kl-0.002", f"kl-0.01{CARD}", "approx~kl-0.01", f"kl-0.05{CARD}", "approx~kl-0.05", "approx")


def test_damage_is_what_the_name_says() -> None:
    assert [damage(level) for level in (EXACT, PACKED, f"kl-0.01{CARD}", "kl-1", "approx~kl-0.05")] == [
        0.0, 0.0, 0.01, 1.0, 0.05,
    ]  # fmt: skip
    for nothing in ("approx", f"kl-0.05>kl-0.01{CARD}", "q8", "", "kl-", "kl-1e-3", "kl-0.01@card", "approx~exact"):
        assert damage(nothing) == math.inf


def test_a_permission_reaches_as_far_as_it_says() -> None:
    for i, level in enumerate(LADDER):
        assert fits(level, None) is (level == EXACT)
        for j, allowed in enumerate(("kl-0.002", "kl-0.01", "kl-0.05")):
            assert fits(level, allowed) is (i <= (1, 3, 5)[j])
        # What is no permission allows nothing but what is exact.
        for wrong in ("", "approx", "nonsense", f"kl-0.05>kl-0.01{CARD}"):
            assert fits(level, wrong) is (level == EXACT)
    assert fits(PACKED, None)


def test_ranks_order_what_is_kept() -> None:
    assert sorted(sorted(LADDER), key=rank) == list(LADDER)
    assert rank(EXACT) == rank(PACKED)
    assert rank("kl-0.01") == rank(f"kl-0.01{CARD}")


def test_names_without_their_cards() -> None:
    assert [short(level) for level in LADDER] == [
        EXACT, "kl-0.002", "kl-0.01", "approx", "kl-0.05", "approx", "approx",
    ]  # fmt: skip
    assert [is_raw(level) for level in (EXACT, PACKED, "kl-0.01", "approx~kl-0.01")] == [True, False, False, True]
    assert [is_exact(level) for level in (EXACT, PACKED, "kl-0.01", "approx")] == [True, True, False, False]
    assert approx(f"kl-0.01{CARD}") == approx("approx~kl-0.01") == "approx~kl-0.01"


def test_of_two_permissions_the_stricter_counts() -> None:
    assert worst(None, "kl-0.01") is worst("kl-0.01", None) is None
    assert worst("kl-0.01", "kl-0.05") == worst("kl-0.05", "kl-0.01") == "kl-0.01"


def test_what_is_no_permission_is_refused() -> None:
    assert check_lossy("kl-0.01") == "kl-0.01"
    for wrong in (EXACT, PACKED, "", "q4", f"kl-0.01{CARD}", "approx~kl-0.01", "kl-0.05>kl-0.01"):
        with pytest.raises(ConfigError, match="no such lossy level"):
            check_lossy(wrong)
