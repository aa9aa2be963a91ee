"""What a ledger knows of deletions: whether there were any since its file was rewritten, and what is left to do."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ctxreuse.errors import StoreDamagedError
from ctxreuse.store.ledger.records import FIX, seal, unseal

__all__ = ["Deletions"]

#: Key in table ``info``: when the first deletion was, and how many there were since.
_MARK = b"deleted"
_TIMES = struct.Struct("<dQ")
#: Before the number of a note, in table ``info``.
_NOTE = b"deletion "
_NUMBER = struct.Struct(">Q")


class Deletions:
    """The rows on deletions inside one transaction, which it must not outlive. ``clock``: seconds since 1970."""

    def __init__(self, txn: Any, table: Any, clock: Callable[[], float]) -> None:
        self._txn, self._table, self._clock = txn, table, clock

    def add(self, note: bytes = b"") -> None:
        """Count a deletion, with a note of what is left to do."""
        first, count = self._times() or (self._clock(), 0)
        self._put(_MARK, _TIMES.pack(first, count + 1))
        if note:
            self._put(_NOTE + _NUMBER.pack(max(self.notes(), default=0) + 1), note)

    def since(self) -> float | None:
        """Return when the first one was; None if there was none."""
        times = self._times()
        return None if times is None else times[0]

    def notes(self) -> dict[int, bytes]:
        """Return all notes by number, oldest first. Raises StoreDamagedError."""
        found: dict[int, bytes] = {}
        with self._txn.cursor(db=self._table) as cursor:
            more = cursor.set_range(_NOTE)
            while more and bytes(cursor.key()).startswith(_NOTE):
                key = bytes(cursor.key())
                found[_NUMBER.unpack(key[len(_NOTE) :])[0]] = self._body(key, cursor.value())
                more = cursor.next()
        return found

    def remove(self, number: int) -> None:
        """Drop a note. What it says leaves the file when that is rewritten the next time."""
        self._txn.delete(_NOTE + _NUMBER.pack(number), db=self._table)

    def marks(self) -> dict[bytes, bytes]:
        """Return the rows that are not needed when all that was deleted by now is in no page any more."""
        raw = self._txn.get(_MARK, db=self._table)
        return {} if raw is None else {_MARK: bytes(raw)}

    def _times(self) -> tuple[float, int] | None:
        raw = self._txn.get(_MARK, db=self._table)
        if raw is None:
            return None
        first, count = _TIMES.unpack(self._body(_MARK, raw))
        return first, count

    def _put(self, key: bytes, body: bytes) -> None:
        self._txn.put(key, seal(key, body), db=self._table)

    def _body(self, key: bytes, raw: bytes) -> bytes:
        try:
            return bytes(unseal(key, raw))
        except ValueError as error:
            raise StoreDamagedError(f"the record of deletions is damaged: {error}", fix=FIX) from None
