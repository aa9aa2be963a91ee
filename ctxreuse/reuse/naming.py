"""Repairs by the names that users, cards and benchmarks write."""

from __future__ import annotations

import re
from itertools import pairwise

from ctxreuse.errors import ConfigError
from ctxreuse.reuse.policies import Asked, Deviant, Every, First, Last, Nothing, Random, layers_of
from ctxreuse.reuse.repair import Repair, Role
from ctxreuse.reuse.sums import Both, Drifting

__all__ = ["SHARE", "parse"]

SHARE = r"\d{1,3}(?:\.\d{1,3})?%"
_DEVIANT = re.compile(
    rf"([kv])-({SHARE}(?:>{SHARE}){{0,3}})(?:@(\d{{1,4}}(?:>\d{{1,4}}){{0,3}}))?(?:/(\d{{1,6}}))?", re.ASCII
)
_RANDOM = re.compile(rf"random-({SHARE})", re.ASCII)
_FIRST = re.compile(r"first-(\d{1,6})", re.ASCII)
_EVERY = re.compile(r"every-(\d{1,6})", re.ASCII)
_ASKED = re.compile(rf"ask(?:\*([kv]))?-({SHARE})(?:@(\d{{1,4}}))?", re.ASCII)
_LAST = re.compile(rf"last-(?:(\d{{1,6}})|({SHARE}))", re.ASCII)


def parse(name: str, *, seed: int = 0) -> Repair:
    """The repair of this name. Raises ConfigError for one that there is not.

    ``none`` (moved as it is), ``rotate`` (keys turned), ``first-8`` (rows of each run), ``last-32`` and ``last-5%`` (of
    all rows those that stand last), ``v-5%`` and ``k-5%`` (the share of all rows that deviates most in V or K at layer
    1), ``v-5%@3`` (at layer 3), ``v-20%/192`` (of the 192 rows that stand last), ``v-15%>8%`` (15 % at layer 1, of
    which 8 % of all at layer 4; ``v-15%>8%@2>6`` names the layers), ``ask-10%`` (the share that the prompt's end
    attends to most), ``ask*v-10%`` (attention times deviation in V at layer 1; ``ask*v-10%@3``: at layer 3),
    ``every-12`` (one row of 12), ``random-15%`` (drawn by ``seed``), and combinations such as ``first-4+v-5%``. With
    ``+drift`` at the end the rows that are left are set right by what the computed ones were off: ``every-12+drift``.
    """
    if name in ("none", "rotate"):
        return Nothing(turn=name == "rotate")
    chosen = name.removesuffix("+drift")
    if chosen.count("+") >= 8:
        raise _unknown(name)
    parts = tuple(_part(word, seed, name) for word in chosen.split("+"))
    repair = parts[0] if len(parts) == 1 else Both(parts)
    return repair if chosen == name else Drifting(repair)


def _part(word: str, seed: int, name: str) -> Repair:
    if (found := _FIRST.fullmatch(word)) is not None and int(found[1]):
        return First(int(found[1]))
    if (found := _EVERY.fullmatch(word)) is not None and int(found[1]):
        return Every(int(found[1]))
    if (found := _LAST.fullmatch(word)) is not None and (found[2] or int(found[1])):
        return Last(share=_fraction(found[2], name)) if found[2] else Last(int(found[1]))
    if (found := _RANDOM.fullmatch(word)) is not None:
        return Random(_fraction(found[1], name), seed)
    if (found := _ASKED.fullmatch(word)) is not None and (found[1] or not found[3]):
        by: Role | None = None if not found[1] else "k" if found[1] == "k" else "v"
        return Asked(_fraction(found[2], name), by, int(found[3] or 1))
    found = _DEVIANT.fullmatch(word)
    if found is None:
        raise _unknown(name)
    shares = [_fraction(share, name) for share in found[2].split(">")]
    layers = tuple(map(int, found[3].split(">"))) if found[3] else layers_of(len(shares))
    falling = all(a > b for a, b in pairwise(shares))
    rising = all(a < b for a, b in pairwise(layers))
    near = int(found[4]) if found[4] else 0
    if len(layers) != len(shares) or not (falling and rising) or (found[4] and not near):
        raise _unknown(name)
    return Deviant("k" if found[1] == "k" else "v", tuple(zip(shares, layers)), near)


def _fraction(text: str, name: str) -> float:
    share = float(text.removesuffix("%")) / 100
    if not 0 < share <= 1:
        raise _unknown(name)
    return share


def _unknown(name: str) -> ConfigError:
    known = (
        "none, rotate, first-8, last-5%, v-5%, k-15%@2, v-20%/192, v-15%>8%, ask-10%, ask*v-10%, every-12, random-15%"
    )
    return ConfigError(f"no such repair: {name[:64]!r}", fix=f"Choose {known} or a sum: first-4+v-5%, every-12+drift")
