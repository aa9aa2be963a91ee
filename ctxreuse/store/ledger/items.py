"""Items inside one transaction: bytes by key, for programs that have more to store than turns."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from ctxreuse.errors import StoreDamagedError, StoreError
from ctxreuse.store.ledger.records import FIX, require_text, seal, unseal

__all__ = ["TABLE", "ItemTable", "item_key"]

TABLE = "items"

#: Bytes of a key, as LMDB has it.
_LONGEST_KEY = 511
#: Bytes of one part of a key; of a longer one stand its beginning and a digest.
_LONGEST_PART, _BEGINNING = 100, 60


def item_key(*parts: str) -> bytes:
    """Return the key of some parts. The key of the first ones begins those of all with the same first ones.

    Keys sort as their parts do, but parts of more than 100 bytes only by their first 60. Raises SessionError for what
    is not text, StoreError for keys that would be too long.
    """
    key = b"".join(_part(part) for part in parts)
    if len(key) > _LONGEST_KEY:
        raise StoreError(f"the names of an item take {len(key)} bytes", fix="Use fewer or shorter names")
    return key


def _part(part: str) -> bytes:
    raw = require_text(part, "a name of an item")
    if len(raw) > _LONGEST_PART:
        raw = raw[:_BEGINNING] + b"\1" + hashlib.sha256(raw).hexdigest()[:32].encode()
    return raw.replace(b"\0", b"\0\xff") + b"\0"


class ItemTable:
    """The items in one transaction, which it must not outlive; for the transaction's thread.

    All methods raise StoreDamagedError for an item that differs from its checksum.
    """

    def __init__(self, txn: Any, tables: Mapping[str, Any]) -> None:
        self._txn, self._table = txn, tables.get(TABLE)
        #: Items that were deleted.
        self.removed = 0

    def get(self, key: bytes) -> bytes | None:
        """Return an item; None if there is none."""
        raw = None if self._table is None else self._txn.get(key, db=self._table)
        return None if raw is None else _body(key, raw)

    def put(self, key: bytes, body: bytes) -> None:
        """Write an item in the place of the one with that key, if any."""
        self._txn.put(key, seal(key, body), db=self._table)

    def delete(self, key: bytes) -> bool:
        """Delete an item; returns False if there was none."""
        found = bool(self._txn.delete(key, db=self._table))
        self.removed += found
        return found

    def scan(self, prefix: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the items whose keys begin so, by key."""
        return ((key, _body(key, raw)) for key, raw in self._rows(prefix, reverse))

    def keys(self, prefix: bytes) -> list[bytes]:
        """Return the keys that begin so."""
        return [key for key, _ in self._rows(prefix)]

    def _rows(self, prefix: bytes, reverse: bool = False) -> Iterator[tuple[bytes, Any]]:
        if self._table is None:
            return
        with self._txn.cursor(db=self._table) as cursor:
            if reverse:
                # After whole parts, no key goes on with 0xff.
                more = cursor.prev() if cursor.set_range(prefix + b"\xff") else cursor.last()
            else:
                more = cursor.set_range(prefix)
            while more and (key := bytes(cursor.key())).startswith(prefix):
                yield key, cursor.value()
                more = cursor.prev() if reverse else cursor.next()

    def damaged(self) -> list[str]:
        """Return what is wrong with items, read all."""
        problems = []
        for key, raw in self._rows(b""):
            try:
                _body(key, raw)
            except StoreDamagedError as error:
                problems.append(error.what)
        return problems


def _body(key: bytes, raw: Any) -> bytes:
    try:
        return bytes(unseal(key, raw))
    except ValueError as error:
        raise StoreDamagedError(f"the item {key[:60]!r} is damaged: {error}", fix=FIX) from None
