"""What the name of a block's level promises: how much damage it stands for, and who may use it.

::

    exact                     the numbers that the engine computed
    exact+rans                the same, packed without loss
    kl-0.01@0123456789abcdef  lossy: coded by the profile with that digest, which aims at a KL of 0.01 nats
    kl-0.01-joint@…           the same promise in fewer bytes: planes of several layers coded as one, which takes longer
    kl-0.05>kl-0.01@…         what turns the first of two levels into the second: no block by itself
    approx~kl-0.05            raw numbers that were computed on top of lossy ones, the worst of which was kl-0.05, or
                              relocated from another position, at the measured cost

A caller's permission is a number, ``max_kl``: the largest KL in nats a token of the KV that it may use; None, or 0,
allows exact KV only. Where it is stored or sent it is the name of the level that just meets it (``kl-0.01``).
"""

from __future__ import annotations

import math
import re
import warnings
from functools import lru_cache
from typing import NamedTuple

import msgspec

from ctxreuse.errors import ConfigError, FormatError

__all__ = [
    "EXACT",
    "JOINT",
    "PACKED",
    "LevelInfo",
    "LevelName",
    "allowed_by",
    "approx",
    "check_limit",
    "check_lossy",
    "expected_kl",
    "family",
    "is_approx",
    "is_exact",
    "is_joint",
    "is_raw",
    "limit_name",
    "limit_of",
    "parse_level",
    "quality_key",
    "read_limit",
    "stricter",
]

EXACT, PACKED = "exact", "exact+rans"
#: How the name of a level ends at which planes of several layers are coded as one.
JOINT = "-joint"

_LOSSY = re.compile(r"kl-(\d{1,4}(?:\.\d{1,9})?)(?:-joint)?(?:@[0-9a-f]{16})?")
_APPROX = "approx"
_CODED = re.compile(r"(?:(kl-[0-9.]{1,12}(?:-joint)?)>)?(kl-[0-9.]{1,12}(?:-joint)?)@([0-9a-f]{16})")
_LARGEST = 10_000.0


@lru_cache(maxsize=1024)
def expected_kl(level: str) -> float:
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
    """Return True if the KV was derived from lossy KV, or relocated."""
    return level.startswith(_APPROX)


def is_joint(level: str) -> bool:
    """Return True if blocks of this level have planes of several layers coded as one."""
    return not is_raw(level) and level.partition("@")[0].endswith(JOINT)


def family(level: str) -> str:
    """The level without its profile, and ``approx`` without its bound: few enough to count by."""
    return _APPROX if level.startswith(_APPROX) else level.partition("@")[0]


def allowed_by(level: str, max_kl: float | None) -> bool:
    """Return True if a caller with the limit ``max_kl`` may use a block stored at ``level``."""
    return level == EXACT or expected_kl(level) <= (max_kl or 0.0)


@lru_cache(maxsize=1024)
def quality_key(level: str) -> tuple[float, bool]:
    """How good a level is: of two blocks of one key that with the lower rank is kept."""
    return expected_kl(level), level.startswith(_APPROX)


def stricter(a: float | None, b: float | None) -> float | None:
    """Of two limits the one that both allow."""
    return None if a is None or b is None else min(a, b)


def approx(below: str) -> str:
    """The level of what is computed on top of a lossy or approx level."""
    return f"{_APPROX}~{below.partition('@')[0].removeprefix(_APPROX + '~')}"


def check_lossy(level: str) -> str:
    """Return ``level`` if it is the plain name of a lossy level, without a profile. Raises ConfigError."""
    if _LOSSY.fullmatch(level) is None or "@" in level:
        fix = "Name the worst level that is allowed, such as kl-0.01; None allows exact ones only"
        raise ConfigError(f"no such lossy level: {level[:64]!r}", fix=fix)
    return level


def check_limit(max_kl: float | None) -> float | None:
    """Return ``max_kl``; None for 0, as both allow exact KV only. Raises ConfigError for what is no KL."""
    if max_kl is None or 0 <= max_kl < _LARGEST:
        return max_kl or None
    raise ConfigError(f"max_kl is {max_kl}", fix="Give nats a token, such as 0.01; None allows exact KV only")


def limit_name(max_kl: float | None) -> str:
    """The stored and sent form of a limit: ``kl-0.01``; "" if only exact KV is allowed."""
    return f"kl-{max_kl:.9f}".rstrip("0").rstrip(".") if max_kl else ""


def limit_of(name: str | None) -> float | None:
    """The limit of a stored or sent name; None, the strictest, for "", ``exact`` and a name that promises nothing."""
    kl = expected_kl(name) if name else 0.0
    return kl if 0 < kl < math.inf else None


def read_limit(value: float | str | None) -> float | None:
    """A limit as callers of the library give it; a level's name, as before 0.2, is still read, with a warning.

    Raises ConfigError, see `check_limit`.
    """
    if not isinstance(value, str):
        return check_limit(value)
    limit = None if value == EXACT else expected_kl(check_lossy(value))
    warnings.warn(f"max_kl={value!r} is now the number {limit or 0.0:g}", DeprecationWarning, stacklevel=3)
    return limit


class LevelName(NamedTuple):
    """A level as a block's header spells it: ``kl-0.01@PROFILE``, or ``kl-0.05>kl-0.005@PROFILE`` for a refinement.

    ``profile`` is the first 16 hex digits of the profile's digest, "" where none is needed; ``base`` the level that a
    refinement refines, "" for a block that stands alone.
    """

    name: str
    profile: str = ""
    base: str = ""

    def __str__(self) -> str:
        base = f"{self.base}>" if self.base else ""
        return f"{base}{self.name}@{self.profile}" if self.profile else self.name

    @property
    def exact(self) -> bool:
        return is_exact(self.name)

    @property
    def coded(self) -> bool:
        """True if the planes must be decoded before an engine can read them."""
        return not is_raw(self.name)


class LevelInfo(msgspec.Struct, frozen=True):
    """What a level costs and does, as measured at calibration on text that it had not seen.

    ``bits`` a K or V value, everything counted; ``kl`` mean Kullback-Leibler divergence of the next token's
    distribution in nats; ``top1`` share of tokens whose most likely successor stays the same; ``dnll`` change of the
    negative log-likelihood in nats a token. ``base``: the level that a refinement leads here from, or "".
    """

    name: str
    lossy: bool
    bits: float
    kl: float = 0.0
    top1: float = 1.0
    dnll: float = 0.0
    base: str = ""


def parse_level(text: str) -> LevelName:
    """Read a header's level; raises FormatError for a text that names none."""
    if text in (EXACT, PACKED) or is_raw(text):
        return LevelName(text)
    match = _CODED.fullmatch(text)
    if match is None:
        raise FormatError(f"no such level: {text[:64]!r}")
    base, name, profile = match.groups()
    return LevelName(name, profile, base or "")
