"""Sizes, durations and rates as people write them: ``8GB``, ``512MiB``, ``5m``, ``250MB/s``.

Decimal prefixes are powers of 1,000 and binary ones (``KiB``) powers of 1,024. Formatting picks the largest unit that
writes the number without loss, so that what is printed reads back as the same number.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from ctxreuse.errors import ConfigError

__all__ = [
    "format_bytes",
    "format_duration",
    "format_rate",
    "parse_bytes",
    "parse_duration",
    "parse_rate",
    "rounded_bytes",
    "rounded_duration",
]

_BYTES = {"B": 1}
for _power, _prefix in enumerate("KMGTP", start=1):
    _BYTES[f"{_prefix}B"] = 1000**_power
    _BYTES[f"{_prefix}iB"] = 1024**_power
_SECONDS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_BYTE_NAMES = {name.lower(): scale for name, scale in _BYTES.items()}
_BYTE_NAMES |= {name[:-1]: scale for name, scale in _BYTE_NAMES.items() if len(name) > 1} | {"": 1}
_NUMBER = re.compile(r"\s*(\d{1,24}(?:\.\d{1,30})?)\s*([A-Za-zµ]*)\s*", re.ASCII)


def _split(text: str, what: str, example: str) -> tuple[Fraction, str]:
    found = _NUMBER.fullmatch(text.replace("µ", "u"))
    if found is None:
        raise ConfigError(f"{text!r} is not a {what}", fix=f"Write a number and a unit, such as {example}")
    return Fraction(Decimal(found[1])), found[2]


def parse_bytes(text: str) -> int:
    """Bytes from ``8GB``, ``512 MiB``, ``1.5g`` or ``4096``; case does not matter. Raises ConfigError."""
    number, unit = _split(text, "size", "8GB or 512MiB")
    scale = _BYTE_NAMES.get(unit.lower())
    if scale is None:
        raise ConfigError(f"{text!r} has an unknown unit of size", fix=f"Use one of {', '.join(_BYTES)}")
    size = number * scale
    if size.denominator != 1:
        raise ConfigError(f"{text!r} is not a whole number of bytes", fix="Write it in a smaller unit")
    return int(size)


def format_bytes(size: int) -> str:
    """The shortest exact way to write a size: 8_000_000_000 is ``8GB``, 536_870_912 is ``512MiB``."""
    if size < 0:
        raise ValueError(f"a size of {size} bytes")
    fits = [f"{size // scale}{unit}" for unit, scale in _BYTES.items() if size % scale == 0]
    return min(fits, key=len) if size else "0B"


def parse_duration(text: str) -> float:
    """Seconds from ``250ms``, ``30s``, ``5m``, ``1.5h`` or a bare number of seconds. Raises ConfigError."""
    number, unit = _split(text, "duration", "250ms, 30s or 5m")
    scale = _SECONDS.get(unit.lower() or "s")
    if scale is None:
        raise ConfigError(f"{text!r} has an unknown unit of time", fix=f"Use one of {', '.join(_SECONDS)}")
    return float(number * scale)


def format_duration(seconds: float) -> str:
    """A duration that reads back as the same number, in the largest unit that keeps it whole: 300 is ``5m``."""
    if not 0 <= seconds < 1e15:
        raise ValueError(f"a duration of {seconds} seconds")
    if seconds == 0:
        return "0s"
    # The float's own decimal digits, not its binary value: 0.1 is 100ms, although the float is not a tenth.
    exact = Fraction(Decimal(repr(seconds)))
    for unit, scale in reversed(_SECONDS.items()):
        if (exact / scale).denominator == 1:
            return f"{exact / scale}{unit}"
    digits = f"{Decimal(repr(seconds)) * 10**9:f}"
    return f"{digits}ns"


def parse_rate(text: str) -> float:
    """Bytes a second from ``250MB/s`` or ``1 Gbit/s`` (bits are lower case ``bit``). Raises ConfigError."""
    amount, slash, per = text.replace("bps", "bit/s").partition("/")
    if not slash or per.strip() != "s":
        raise ConfigError(f"{text!r} is not a rate", fix="Write an amount a second, such as 250MB/s or 100Mbit/s")
    if amount.rstrip().endswith("bit"):
        return parse_bytes(amount.rstrip().removesuffix("bit") + "B") / 8
    return float(parse_bytes(amount))


def format_rate(rate: float) -> str:
    """A rate of whole bytes a second, exact: 250_000_000 is ``250MB/s``. A fraction of a byte is rounded away."""
    return f"{format_bytes(round(rate))}/s"


def rounded_bytes(size: float) -> str:
    """A size for people, three digits: 1_234_567 is ``1.23MB``. Loses digits; never for settings."""
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(size) >= scale * 0.9995:
            return f"{size / scale:.3g}{unit}" if abs(size) < scale * 999.5 else f"{size / scale:.0f}{unit}"
    return f"{size:.0f}B"


def rounded_duration(seconds: float) -> str:
    """A duration for people, three digits: 0.00123 is ``1.23ms``, 90 is ``1m30s``. Never for settings."""
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60}h{minutes % 60:02d}m"
    if seconds >= 60:
        whole = round(seconds)
        return f"{whole // 60}m{whole % 60:02d}s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale * 0.9995:
            return f"{seconds / scale:.3g}{unit}"
    return f"{seconds * 1e9:.3g}ns"
