"""The turns of a ledger inside one transaction: ancestors, common ancestors, histories."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ctxreuse.errors import SessionError
from ctxreuse.store.ledger.records import DamagedTurnError, Links, Turn, decode_turn

__all__ = ["History", "turn_key"]

_NONE = Links(0, 0, 0)
_ROOT = bytes(8)


def turn_key(id: object) -> bytes:
    """Return the key of a turn: big-endian, so that LMDB's order is the order of ids.

    Raises SessionError for an id outside 64 bits, or True, which Python takes for 1.
    """
    if isinstance(id, int) and not isinstance(id, bool) and 0 <= id < 1 << 64:
        return id.to_bytes(8, "big")
    raise SessionError(f"there is no turn {id!r}", fix="List a session's turns for the ids it has")


class History:
    """The turns in one transaction, which it must not outlive; for the transaction's thread."""

    def __init__(self, txn: Any, table: Any) -> None:
        self._txn, self._table = txn, table

    def raw(self, id: int) -> bytes | memoryview:
        key = turn_key(id)
        found: bytes | memoryview | None = self._txn.get(key, db=self._table) if id else None
        if found is None:
            raise SessionError(f"there is no turn {id}", fix="List a session's turns for the ids it has")
        return found

    def has(self, id: int) -> bool:
        """Return True if there is such a turn; there always is turn 0, before the first."""
        return not id or self._txn.get(turn_key(id), db=self._table) is not None

    def links(self, id: int) -> Links:
        """Return the links of a turn; of turn 0, zeros. Raises SessionError if unknown."""
        return Links.unpack(id, self.raw(id)) if id or turn_key(id) != _ROOT else _NONE

    def turn(self, id: int) -> Turn:
        """Return a turn. Raises SessionError if unknown."""
        return decode_turn(id, self.raw(id))

    def child_of(self, parent: int) -> Links:
        """Return the links of a new turn after ``parent``; see `Links`."""
        above = self.links(parent)
        far = self.links(above.jump)
        # The jump doubles where the two jumps above span the same distance.
        jump = far.jump if above.depth - far.depth == far.depth - self.links(far.jump).depth else parent
        return Links(parent, jump if parent else 0, above.depth + 1)

    def up(self, head: int) -> Iterator[int]:
        """Iterate over turn ids from ``head`` to the root."""
        while head:
            yield head
            head = self.links(head).parent

    def reaches(self, head: int, ids: set[int]) -> set[int]:
        """Return those of ``ids`` in the history that ends at ``head``, as far as it can be read."""
        found: set[int] = set()
        with suppress(DamagedTurnError, SessionError):
            found.update(id for id in self.up(head) if id in ids)
        return found

    def at_depth(self, id: int, depth: int) -> int:
        """Return the ancestor of ``id`` (or itself) with that depth. O(log depth)."""
        links = self.links(id)
        while links.depth > depth:
            far = self.links(links.jump)
            if far.depth >= depth:
                id, links = links.jump, far
            else:
                id, links = links.parent, self.links(links.parent)
        return id

    def ancestor(self, a: int, b: int) -> bool:
        """Return True if ``a`` is ``b`` or in its history; 0 is in all."""
        return self.at_depth(b, self.links(a).depth) == a

    def common(self, a: int, b: int) -> int:
        """Return the deepest turn in both histories, 0 if there is none. O(log depth)."""
        depth = min(self.links(a).depth, self.links(b).depth)
        a, b = self.at_depth(a, depth), self.at_depth(b, depth)
        while a != b:
            one, other = self.links(a), self.links(b)
            # Turns of equal depth have jumps of equal depth: if these differ, the meeting point lies above them.
            a, b = (one.jump, other.jump) if one.jump != other.jump else (one.parent, other.parent)
        return a
