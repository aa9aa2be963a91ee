"""Units: what is printed reads back as the same number, and what is not a number is refused with a hint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import ConfigError
from ctxreuse.units import (
    format_bytes,
    format_duration,
    format_rate,
    parse_bytes,
    parse_duration,
    parse_rate,
    rounded_bytes,
    rounded_duration,
)


@given(st.integers(0, 2**70))
def test_bytes_read_back(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


@given(st.floats(1e-9, 1e14))
def test_durations_read_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(0, 2**60))
def test_rates_read_back(rate: int) -> None:
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=1e-15)


@given(st.floats(0, 1e18))
def test_rounded_sizes_are_near_and_short(size: float) -> None:
    text = rounded_bytes(size)
    assert len(text) <= 8
    assert float(parse_bytes(text)) == pytest.approx(size, rel=0.006, abs=0.51)


@given(st.floats(1e-9, 59))
def test_rounded_durations_are_near_and_short(seconds: float) -> None:
    text = rounded_duration(seconds)
    assert len(text) <= 8
    assert parse_duration(text) == pytest.approx(seconds, rel=0.006)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5g", 1_500_000_000),
        ("4096", 4096),
        ("0", 0),
        ("64k", 64_000),
        ("64Ki", 65_536),
        (" 2 TB ", 2 * 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("5m", 300), ("250ms", 0.25), ("1.5h", 5400), ("90", 90), ("3 d", 259200), ("10µs", 1e-5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "rate"), [("250MB/s", 250e6), ("100Mbit/s", 12.5e6), ("1 Gbps", 125e6), ("8 bit/s", 1), ("1KiB/s", 1024)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "8GX", "1.5B", "8 G B", "٣GB", "nan", "0x10"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_bytes(text)
    assert error.value.fix


@pytest.mark.parametrize("text", ["", "m", "5 minutes", "-3s", "inf", "1y"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_duration(text)


@pytest.mark.parametrize("text", ["250MB", "250MB/m", "/s", "x/s", ""])
def test_no_rates(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_rate(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(300, "5m"), (0.25, "250ms"), (0, "0s"), (3600, "1h"), (0.1, "100ms"), (90, "90s")]
)
def test_shown_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_shown_sizes() -> None:
    shown = [format_bytes(n) for n in (0, 1001, 8 * 10**9, 2**29, 2**30, 1500)]
    assert shown == ["0B", "1001B", "8GB", "512MiB", "1GiB", "1500B"]
    assert [rounded_duration(s) for s in (90, 3700, 59.99, 0.00123)] == ["1m30s", "1h02m", "60s", "1.23ms"]
    with pytest.raises(ValueError, match="-1"):
        format_bytes(-1)
    with pytest.raises(ValueError, match="-1"):
        format_duration(-1)
