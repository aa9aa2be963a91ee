"""Levels as headers spell them and as cards measure them; what a name promises is in ctxreuse.levels."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from ctxreuse.errors import FormatError
from ctxreuse.levels import EXACT, PACKED, is_exact, is_raw

__all__ = ["LevelInfo", "LevelName", "parse_level"]

_CODED = re.compile(r"(?:(kl-[0-9.]{1,12})>)?(kl-[0-9.]{1,12})@([0-9a-f]{16})")


class LevelName(NamedTuple):
    """A level as a block's header spells it: ``kl-0.01@CARD``, or ``kl-0.05>kl-0.005@CARD`` for a refinement.

    ``card`` is the first 16 hex digits of the card's digest, "" where none is needed; ``base`` the level that a
    refinement refines, "" for a block that stands alone.
    """

    name: str
    card: str = ""
    base: str = ""

    def __str__(self) -> str:
        base = f"{self.base}>" if self.base else ""
        return f"{base}{self.name}@{self.card}" if self.card else self.name

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
    base, name, card = match.groups()
    return LevelName(name, card, base or "")
