"""Clocks: the fake one moves only when told, the real ones move by themselves."""

from __future__ import annotations

import pytest

from ctxreuse.clock import SYSTEM_CLOCK, Clock
from ctxreuse.testing.clock import FakeClock


def test_a_fake_clock_stands_still_until_moved() -> None:
    fake = FakeClock(100.0)
    clock: Clock = fake
    assert (clock.now(), clock.monotonic(), fake()) == (100.0, 0.0, 100.0)
    fake.advance(2.5)
    assert (clock.now(), clock.monotonic()) == (102.5, 2.5)
    fake.jump(50.0)
    assert (clock.now(), clock.monotonic()) == (50.0, 2.5)
    with pytest.raises(ValueError, match="-1"):
        fake.advance(-1)


def test_the_system_clock_never_goes_back() -> None:
    readings = [SYSTEM_CLOCK.monotonic() for _ in range(100)]
    assert readings == sorted(readings)
    assert SYSTEM_CLOCK.now() > 1_600_000_000
