"""What people allow a repair to compute, in shares, tokens or seconds, as a number of rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ctxreuse.errors import ConfigError
from ctxreuse.reuse.naming import SHARE
from ctxreuse.reuse.policies import share_of
from ctxreuse.units import parse_duration

if TYPE_CHECKING:
    from ctxreuse.cost import PrefillLine

__all__ = ["budget_tokens", "is_time"]


def is_time(budget: str) -> bool:
    """True for a budget that takes knowing how long computing takes."""
    return bool(budget) and not budget.endswith("%") and not budget.isdigit()


def budget_tokens(budget: str, tokens: int, line: PrefillLine | None = None, held: int = 0) -> int:
    """How many of ``tokens`` moved rows a budget pays for: ``10%`` of them, ``64`` of them, or as many as are computed
    in ``200ms``.

    ``line``: what computing takes here; ``held``: tokens that they are computed behind. A budget of time is 0 as long
    as nothing is known of that. Raises ConfigError for what is no budget.
    """
    if budget.endswith("%"):
        if re.fullmatch(SHARE, budget, re.ASCII) is None or float(budget[:-1]) > 100:
            raise _no_budget(budget)
        return min(tokens, share_of(float(budget[:-1]) / 100, tokens, tokens))
    if budget.isascii() and budget.isdigit() and len(budget) < 12:
        return min(tokens, int(budget))
    try:
        seconds = parse_duration(budget)
    except ConfigError:
        raise _no_budget(budget) from None
    low, high = 0, tokens  # the most that take no longer, by halving
    while low < high:
        middle = (low + high + 1) // 2
        takes = line.seconds(middle, held) if line is not None else None
        if takes is not None and takes <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


def _no_budget(budget: str) -> ConfigError:
    return ConfigError(f"{budget[:32]!r} is no budget", fix="Write a share, tokens or a time: 10%, 64 or 200ms")
