"""A value that waits to be written, with what its header says of it."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from ctxreuse.block import parse
from ctxreuse.errors import FormatError
from ctxreuse.levels import EXACT, damage, rank
from ctxreuse.store.base import Buffer, Kind
from ctxreuse.store.records import footprint

__all__ = ["Put"]


class Put(NamedTuple):
    """A queued value with what its header says; ``lossy``: the worst level that its owner allows ("": exact only)."""

    key: bytes
    parent: bytes
    tokens: int
    end: int
    size: int
    data: memoryview
    kind: Kind
    replace: bool
    level: str = EXACT
    lossy: str = ""
    space: bytes = b""

    @classmethod
    def parse(cls, key: bytes, data: Buffer, kind: Kind, replace: bool, lossy: str | None = None) -> Put | None:
        """What the value's own header says; None if it is no value of this key."""
        try:
            view = parse(data)
        except FormatError:
            return None
        header, size = view.header, footprint(len(view.buffer))
        # A refinement is no block by itself, and of an unknown level nobody could say who may read it.
        if header.key != key or header.kind != kind or damage(header.level) == math.inf:
            return None
        parts = (key, header.parent, len(header.tokens) // 4, header.end, size, view.buffer, kind, replace)
        return cls(*parts, sys.intern(header.level), lossy or "", header.space)

    def beats(self, held: str) -> bool:
        """True if it should be written although its key is held at the level ``held``."""
        mine, theirs = rank(self.level), rank(held)
        return mine < theirs or (self.replace and mine == theirs)
