"""Hints: what a caller knows of a session's future, as priorities that decay and so can never fill a store."""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from ctxreuse.errors import ConfigError
from ctxreuse.pauses.kinds import FIRST_HINT

__all__ = ["HINTS", "Hint", "HintName", "check_hint", "hint_label", "weight"]

HintName: TypeAlias = Literal["share", "prefetch", "demote", "pin", "retain"]

HINTS: Final[tuple[str, ...]] = get_args(HintName)

#: Initial factor by which a hint multiplies a session's worth.
_FACTORS: Final = {"share": 4.0, "prefetch": 2.0, "demote": 1 / 64, "pin": 64.0, "retain": 8.0}
#: Seconds after which half of a hint's strength (its logarithm) is gone, where the caller names no end.
_HALF: Final = 300.0
#: Halvings until the end that a caller names: a sixteenth of the strength is left then.
_UNTIL: Final = 4.0
#: Longest half-life in seconds: even a hint for years is forgotten after a day.
_LONGEST: Final = 6 * 3600.0


class Hint(NamedTuple):
    """A hint given at ``since``, of which half is gone after ``half`` seconds."""

    name: str
    since: float
    half: float = _HALF

    @classmethod
    def given(cls, name: str, now: float, until: float | None = None) -> Hint:
        """Return a hint given now, expected to matter until ``until``. Raises ConfigError for an unknown one."""
        check_hint(name)
        if until is None:
            return cls(name, now)
        left = until - now if math.isfinite(until - now) else _LONGEST * _UNTIL
        return cls(name, now, min(max(left / _UNTIL, 1e-3), _LONGEST))

    def factor(self, now: float) -> float:
        """Return the factor of the worth now: the hint's at first, 1 in the end."""
        halvings = max(now - self.since, 0.0) / self.half
        return float(_FACTORS[self.name] ** (0.5 ** min(halvings, 1000.0)))


def check_hint(name: str) -> None:
    """Raise ConfigError, naming those there are, for an unknown hint."""
    if name not in HINTS:
        raise ConfigError(f"no hint {name[:40]!r}", fix=f"Choose one of: {', '.join(HINTS)}")


def hint_label(name: str) -> int:
    """Return the hint as a label, for policies that see labels only. Raises ConfigError for an unknown one."""
    check_hint(name)
    return FIRST_HINT + HINTS.index(name)


def weight(hints: dict[str, Hint], now: float) -> float:
    """Return the product of all hints of a session, within 1/64 and 512."""
    product = 1.0
    for hint in hints.values():
        product *= hint.factor(now)
    return min(max(product, 1 / 64), 512.0)
