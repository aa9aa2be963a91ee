"""Where two prompts part: the first token that differs, how much changed there, and whether they go on alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from ctxreuse.identity.keys import Tokens, common_prefix
from ctxreuse.why.records import PromptPart

__all__ = ["Decode", "Difference", "Divergence", "divergence", "part_at", "wording"]

#: How ids become text; special ids are left out.
Decode = Callable[[Tokens], str]

# Tokens that must be equal in a row before two prompts count as going on alike, and how far behind the first
# difference they are looked for.
_ALIKE, _REACH = 12, 256
# Tokens whose text is shown before and behind the first difference.
_BEFORE, _BEHIND = 16, 24
# A part is decoded from its beginning to say at which character it differs; of a longer one no character is said.
_MOST = 1 << 16


class Divergence(msgspec.Struct, frozen=True):
    """Two lists of ids are equal up to ``at``. ``changed``: both go on; ``grown``: the other one ends there; ``cut``:
    this one does. After ``here`` own and ``there`` other tokens, ``alike`` ones are equal again (0: none)."""

    kind: Literal["changed", "grown", "cut"]
    at: int
    here: int = 0
    there: int = 0
    alike: int = 0


class Difference(msgspec.Struct, frozen=True):
    """The first difference from an earlier request, in words.

    ``request``, ``seconds``: which one it was, and how long before. ``token``: the first that differs; ``exact``: False
    if only the block of it is known. ``part``, ``name``, ``part_token``, ``character``: in which part of the prompt
    (counted from 1) and where in it; ``character`` is None where the texts are not kept. ``before``: the last words
    that both have, then ``here`` of this request and ``there`` of the other, which differ in their first ``changed``
    and ``other_changed`` characters. ``alike``: tokens behind the change that are the same in both and had to be
    computed again, because KV depends on everything before it. ``answer``: it lies in what was the other request's
    answer, so the answer came back otherwise than it was generated.
    """

    kind: Literal["changed", "grown", "cut"]
    request: str
    seconds: float
    token: int
    exact: bool
    part: int
    name: str
    part_token: int
    character: int | None = None
    before: str = ""
    here: str = ""
    there: str = ""
    changed: int = 0
    other_changed: int = 0
    here_tokens: int = 0
    there_tokens: int = 0
    alike: int = 0
    answer: bool = False


def divergence(here: Tokens, there: Tokens) -> Divergence:
    """Return how ``here`` differs from ``there``."""
    at = common_prefix(here, there)
    if at == len(there):
        return Divergence("grown", at)
    if at == len(here):
        return Divergence("cut", at)
    best: tuple[int, int] | None = None
    raw = np.ascontiguousarray(there[at : at + _REACH + _ALIKE], "<i4").tobytes()
    for skip in range(min(_REACH, len(here) - at - _ALIKE) + 1):
        probe = np.ascontiguousarray(here[at + skip : at + skip + _ALIKE], "<i4").tobytes()
        found = raw.find(probe)
        while found > 0 and found % 4:  # bytes of two ids that look like those of one
            found = raw.find(probe, found + 1)
        if found >= 0 and (best is None or skip + found // 4 < sum(best)):
            best = skip, found // 4
        if best is not None and skip >= sum(best):
            break
    if best is None:
        return Divergence("changed", at, len(here) - at, len(there) - at)
    alike = common_prefix(here[at + best[0] :], there[at + best[1] :])
    return Divergence("changed", at, *best, alike)


def part_at(parts: Sequence[PromptPart], token: int) -> tuple[int, str, int]:
    """Return the number (from 1) and name of the part that ``token`` is in, and where that part begins."""
    start = 0
    for number, part in enumerate(parts, 1):
        if token < part.end:
            return number, part.name, start
        start = part.end
    return len(parts) + 1, "" if not parts else "the answer's beginning", start


def wording(
    found: Divergence, here: Tokens, there: Tokens, start: int, name: str, decode: Decode
) -> tuple[int | None, str, str, str, int, int]:
    """(character, before, here, there, changed, other_changed) of a `Difference`; the part is ``name``, from ``start``.

    Characters are counted from where the part's own text begins, behind what the template puts before it.
    """
    at = found.at
    near = max(start, at - _BEFORE)
    character = None
    if at - start <= _MOST:
        mine, other = decode(here[start : at + 8]), decode(there[start : at + 8])
        shared = _same(mine, other)
        character = max(0, shared - _header(mine, name))
    ends = at + max(found.here, 1), at + max(found.there, 1)
    mine = decode(here[near : ends[0] + _BEHIND])
    other = decode(there[near : ends[1] + _BEHIND])
    shared = _same(mine, other)
    if not found.alike:
        return character, mine[:shared], mine[shared:], other[shared:], len(mine) - shared, len(other) - shared
    # What follows is the same text, so what changed ends where the common ends of both begin.
    tail = _same(mine[shared:][::-1], other[shared:][::-1]) if found.alike >= _BEHIND else 0
    changed, theirs = len(mine) - shared - tail, len(other) - shared - tail
    if not tail:
        changed = len(decode(here[near : ends[0]])) - shared if found.here else 0
        theirs = len(decode(there[near : ends[1]])) - shared if found.there else 0
    return character, mine[:shared], mine[shared:], other[shared:], max(changed, 0), max(theirs, 0)


def _same(one: str, two: str) -> int:
    n = min(len(one), len(two))
    return next((i for i in range(n) if one[i] != two[i]), n)


def _header(text: str, name: str) -> int:
    """Characters that the template puts before a part's own text, as far as one can tell: its name and a line's end."""
    if not name or not text.startswith(name):
        return 0
    rest = text[len(name) :]
    return len(text) - len(rest.lstrip(": \n")) if rest[:1] in (":", "\n") else 0
