"""Walking the turns of a ledger inside one transaction: ancestors, common ancestors, whole histories."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ctxreuse.errors import SessionError
from ctxreuse.store.ledger_records import Links, Turn, decode_turn

__all__ = ["History", "turn_key"]

_NONE = Links(0, 0, 0)
_ROOT = bytes(8)


def turn_key(id: object) -> bytes:
    """Big-endian, so that LMDB's order is the order of ids; ids outside 64 bits name no turn.

    Neither does True, which Python takes for 1 and which no session's record can be read back with.
    """
    if isinstance(id, int) and not isinstance(id, bool) and 0 <= id < 1 << 64:
        return id.to_bytes(8, "big")
    raise SessionError(f"there is no turn {id!r}", fix="List a session's turns for the ids it has")


class History:
    """Turns as one transaction sees them. Lives as long as the transaction; owned by its thread."""

    def __init__(self, txn: Any, table: Any) -> None:
        self._txn, self._table = txn, table

    def raw(self, id: int) -> bytes | memoryview:
        key = turn_key(id)
        found: bytes | memoryview | None = self._txn.get(key, db=self._table) if id else None
        if found is None:
            raise SessionError(f"there is no turn {id}", fix="List a session's turns for the ids it has")
        return found

    def links(self, id: int) -> Links:
        """The links of a turn; of turn 0, zeros. Raises SessionError if unknown."""
        return Links.unpack(self.raw(id)) if id or turn_key(id) != _ROOT else _NONE

    def turn(self, id: int) -> Turn:
        """Raises SessionError if unknown."""
        return decode_turn(id, self.raw(id))

    def child_of(self, parent: int) -> Links:
        """Links of a new turn after ``parent``. The jump doubles where the two jumps above span the same distance."""
        above = self.links(parent)
        far = self.links(above.jump)
        jump = far.jump if above.depth - far.depth == far.depth - self.links(far.jump).depth else parent
        return Links(parent, jump if parent else 0, above.depth + 1)

    def up(self, head: int) -> Iterator[int]:
        """Turn ids from ``head`` to the root."""
        while head:
            yield head
            head = self.links(head).parent

    def at_depth(self, id: int, depth: int) -> int:
        """The ancestor of ``id`` (or itself) with that depth. O(log depth)."""
        links = self.links(id)
        while links.depth > depth:
            far = self.links(links.jump)
            if far.depth >= depth:
                id, links = links.jump, far
            else:
                id, links = links.parent, self.links(links.parent)
        return id

    def ancestor(self, a: int, b: int) -> bool:
        """True if ``a`` is ``b`` or stands in its history; 0 stands in all."""
        return self.at_depth(b, self.links(a).depth) == a

    def common(self, a: int, b: int) -> int:
        """The deepest turn in both histories, 0 if there is none. O(log depth)."""
        depth = min(self.links(a).depth, self.links(b).depth)
        a, b = self.at_depth(a, depth), self.at_depth(b, depth)
        while a != b:
            one, other = self.links(a), self.links(b)
            # Turns of equal depth have jumps of equal depth: if these differ, the meeting point lies above them.
            a, b = (one.jump, other.jump) if one.jump != other.jump else (one.parent, other.parent)
        return a
