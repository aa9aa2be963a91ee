"""How much selective recomputation may cost: a share of the relocated tokens, a number of them, or seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ctxreuse.errors import ConfigError
from ctxreuse.reuse.recompute import SHARE, share_of
from ctxreuse.units import parse_duration

if TYPE_CHECKING:
    from ctxreuse.cost import PrefillLine

__all__ = ["MaxSeconds", "MaxTokens", "RecomputeBudget", "Share", "parse_budget"]


@dataclass(frozen=True)
class Share:
    """At most this share of the relocated tokens, 0 to 1. Raises ConfigError for another number."""

    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"{self.share} is no share", fix="Give a number from 0 to 1, such as Share(0.1)")

    def tokens(self, relocated: int, line: PrefillLine | None = None, behind: int = 0) -> int:
        """How many of ``relocated`` tokens may be recomputed."""
        return min(relocated, share_of(self.share, relocated, relocated))


@dataclass(frozen=True)
class MaxTokens:
    """At most so many tokens."""

    count: int

    def tokens(self, relocated: int, line: PrefillLine | None = None, behind: int = 0) -> int:
        """How many of ``relocated`` tokens may be recomputed."""
        return min(relocated, max(self.count, 0))


@dataclass(frozen=True)
class MaxSeconds:
    """As many tokens as are computed in so many seconds; none as long as nothing is known of that."""

    seconds: float

    def tokens(self, relocated: int, line: PrefillLine | None = None, behind: int = 0) -> int:
        """How many of ``relocated`` tokens may be recomputed; ``line``: what computing takes, ``behind`` so many."""
        low, high = 0, relocated  # the most that take no longer, by halving
        while low < high:
            middle = (low + high + 1) // 2
            takes = line.seconds(middle, behind) if line is not None else None
            if takes is not None and takes <= self.seconds:
                low = middle
            else:
                high = middle - 1
        return low


RecomputeBudget: TypeAlias = Share | MaxTokens | MaxSeconds


def parse_budget(text: str) -> RecomputeBudget | None:
    """A budget as settings write it: ``10%``, ``64`` (tokens) or ``200ms``; None for "". Raises ConfigError."""
    if not text:
        return None
    if text.endswith("%") and re.fullmatch(SHARE, text, re.ASCII) and float(text[:-1]) <= 100:
        return Share(float(text[:-1]) / 100)
    if text.isascii() and text.isdigit() and len(text) < 12:
        return MaxTokens(int(text))
    try:
        return MaxSeconds(parse_duration(text))
    except ConfigError:
        fix = "Write a share, tokens or a time: 10%, 64 or 200ms"
        raise ConfigError(f"{text[:32]!r} is no budget", fix=fix) from None
