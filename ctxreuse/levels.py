"""What the name of a block's level promises: how much damage it stands for, and who may use it.

::

    exact                     the numbers that the engine computed
    exact+rans                the same, packed without loss
    kl-0.01@0123456789abcdef  lossy: coded by the card with that digest, which aims at a KL of 0.01 nats
    kl-0.05>kl-0.01@…         what turns the first of two levels into the second: no block by itself
    approx~kl-0.05            raw numbers that were computed on top of lossy ones, the worst of which was kl-0.05, or
                              moved from another position, which was measured to cost so much

A permission is the name of the worst level that is allowed, without a card (``kl-0.01``); None allows exact ones only.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from ctxreuse.errors import ConfigError

__all__ = [
    "EXACT",
    "PACKED",
    "approx",
    "check_lossy",
    "damage",
    "fits",
    "is_approx",
    "is_exact",
    "is_raw",
    "rank",
    "short",
    "worst",
]

EXACT, PACKED = "exact", "exact+rans"

_LOSSY = re.compile(r"kl-(\d{1,4}(?:\.\d{1,9})?)(?:@[0-9a-f]{16})?")
_APPROX = "approx"


@lru_cache(maxsize=1024)
def damage(level: str) -> float:
    """The KL (nats a token) that a level stands for: 0 if exact, infinite for a name that promises nothing.

    For ``approx`` it is that of the worst level below, infinite if that is not said.
    """
    if level in (EXACT, PACKED):
        return 0.0
    found = _LOSSY.fullmatch(level.removeprefix(_APPROX + "~"))
    return float(found[1]) if found is not None else math.inf


def is_exact(level: str) -> bool:
    """True if blocks of this level hold, or unpack to, the very numbers that were computed."""
    return level in (EXACT, PACKED)


def is_raw(level: str) -> bool:
    """True if the planes of such blocks are numbers as the engine keeps them."""
    return level == EXACT or level.startswith(_APPROX)


def is_approx(level: str) -> bool:
    """True for what was computed on top of something lossy, or moved."""
    return level.startswith(_APPROX)


def short(level: str) -> str:
    """The level without its card, and ``approx`` without its bound: few enough to count by."""
    return _APPROX if level.startswith(_APPROX) else level.partition("@")[0]


def fits(level: str, lossy: str | None) -> bool:
    """True if whoever allows ``lossy`` at worst may use blocks of this level."""
    if level == EXACT:
        return True
    return damage(level) <= (damage(lossy) if lossy is not None else 0.0) < math.inf


@lru_cache(maxsize=1024)
def rank(level: str) -> tuple[float, bool]:
    """How good a level is: of two blocks of one key that with the lower rank is kept."""
    return damage(level), level.startswith(_APPROX)


def worst(a: str | None, b: str | None) -> str | None:
    """Of two permissions the stricter one: what both allow."""
    if a is None or b is None:
        return None
    return a if damage(a) <= damage(b) else b


def approx(below: str) -> str:
    """The level of what is computed on top of a lossy or approx level."""
    return f"{_APPROX}~{below.partition('@')[0].removeprefix(_APPROX + '~')}"


def check_lossy(lossy: str) -> str:
    """The permission itself. Raises ConfigError for what is not the plain name of a lossy level."""
    if _LOSSY.fullmatch(lossy) is None or "@" in lossy:
        fix = "Name the worst level that is allowed, such as kl-0.01; None allows exact ones only"
        raise ConfigError(f"no such lossy level: {lossy[:64]!r}", fix=fix)
    return lossy
