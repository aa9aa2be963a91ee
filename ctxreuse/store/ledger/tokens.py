"""Token ids of turns inside one transaction, by turn and model space."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from ctxreuse.errors import SessionError
from ctxreuse.store.ledger.history import turn_key
from ctxreuse.store.ledger.records import decode_tokens, encode_tokens

__all__ = ["TokenTable"]


class TokenTable:
    """The token ids in one transaction, which it must not outlive; for the transaction's thread."""

    def __init__(self, txn: Any, tables: Mapping[str, Any]) -> None:
        self._txn, self._table = txn, tables["tokens"]

    def put(self, id: int, space: bytes, tokens: bytes) -> None:
        """Write a turn's ids (int32 little-endian). Raises SessionError for lengths that cannot be."""
        if len(space) != 32 or len(tokens) % 4:
            fix = "Give a space digest of 32 bytes and int32 token ids"
            raise SessionError(f"{len(tokens)} bytes of tokens for a space of {len(space)} bytes", fix=fix)
        key = turn_key(id) + space
        self._txn.put(key, encode_tokens(key, tokens), db=self._table)

    def get(self, id: int, space: bytes, *, checked: bool) -> bytes | None:
        """Return a turn's ids in a space, or None; ``checked``: the record must have a checksum."""
        key = turn_key(id) + space
        raw = self._txn.get(key, db=self._table)
        return decode_tokens(key, raw, checked=checked) if raw is not None else None

    def spaces(self, id: int) -> list[bytes]:
        """Return the digests of the spaces that have ids of a turn."""
        cursor, prefix = self._txn.cursor(db=self._table), turn_key(id)
        keys = cursor.iternext(values=False) if cursor.set_range(prefix) else iter(())
        return [bytes(key[8:]) for key in takewhile(lambda key: key[:8] == prefix, keys)]
