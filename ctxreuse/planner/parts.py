"""Typed parts of a prompt: how long each kind stays as it is decides which comes first."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

from ctxreuse.identity.keys import Tokens

__all__ = ["KINDS", "MOVABLE", "Part", "PartKind"]

PartKind = Literal["system", "tools", "document", "memory", "turn", "volatile"]

#: The most stable kind first: what changes with each request, such as a date, stands last.
KINDS: Final[tuple[PartKind, ...]] = get_args(PartKind)
#: Kinds whose parts may change places among themselves.
MOVABLE: Final = frozenset[PartKind]({"document", "memory"})


class Part(NamedTuple):
    """One part of a prompt, encoded by itself: its kind and its token ids, int32 [n]."""

    kind: PartKind
    ids: Tokens
