"""Where the rows of a chunk lie in blocks that a store holds, or held when this was noted."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Home"]


class Home(NamedTuple):
    """Rows ``row`` to ``row + count`` of the concatenated tokens of blocks ``keys`` (consecutive ones of one prompt).

    ``at`` is the position of row 0 of ``keys[0]`` in its prompt, so the chunk's first token stood at ``at + row``.
    ``count`` may be less than the chunk's tokens: its end was not stored. The last of ``keys`` may be blocks behind
    these rows: where a chunk ends is not where the same tokens do. A hint: the blocks may have gone since, and whoever
    reads them compares the token ids.
    """

    keys: tuple[bytes, ...]
    row: int
    count: int  # type: ignore[assignment]  # no tuple is searched here
    at: int

    @property
    def first(self) -> int:
        """The position at which the chunk's first token stood."""
        return self.at + self.row
