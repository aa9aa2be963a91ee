"""Values of checkpoints as items: one for each element of a list and each other value, stored once in a thread."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import msgspec

from ctxreuse.errors import StoreDamagedError
from ctxreuse.store.items import ItemTable, item_key

__all__ = ["Serializer", "StoredValue", "Values", "digests_of", "sweep"]

_DIGEST = 16
#: Elements whose digests form one item, so that a longer list shares all but its last such items with the shorter one.
_GROUP = 64
#: Bytes of a value that stands in the checkpoint itself.
_SMALL = 48
_decode = msgspec.msgpack.Decoder(tuple[str, bytes])


class Serializer(Protocol):
    """How values become bytes: LangGraph's protocol."""

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """Return the name of a form, and bytes."""

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return the value."""


class StoredValue(msgspec.Struct, frozen=True, array_like=True):
    """Where a value is: in itself (``raw``), or in the item of a digest; of a list, in items of digests of elements."""

    kind: str = ""
    raw: bytes = b""
    digests: list[bytes] = []
    is_list: bool = False


class Values:
    """The values of one thread in one transaction."""

    def __init__(self, table: ItemTable, thread: str, serde: Serializer) -> None:
        self._table, self._thread, self._serde = table, thread, serde

    def put(self, value: Any) -> StoredValue:
        """Store a value, as far as it is not there yet."""
        if type(value) is not list:
            kind, raw = self._serde.dumps_typed(value)
            if len(raw) <= _SMALL:
                return StoredValue(kind, raw)
            return StoredValue(digests=[self._add(msgspec.msgpack.encode((kind, raw)))])
        elements = [msgspec.msgpack.encode(self._serde.dumps_typed(one)) for one in value]
        groups = []
        for at in range(0, len(elements), _GROUP):
            group = elements[at : at + _GROUP]
            joined = b"".join(map(_digest, group))
            key = _key(self._thread, _digest(joined))
            if self._table.get(key) is None:
                for element in group:
                    self._add(element)
                self._table.put(key, joined)
            groups.append(_digest(joined))
        return StoredValue(digests=groups, is_list=True)

    def get(self, stored: StoredValue) -> Any:
        """Return a value. Raises StoreDamagedError if a part of it is not there."""
        if stored.is_list:
            parts = _elements(self._table, self._thread, stored.digests)
            return [self._serde.loads_typed(_decode.decode(_item(self._table, self._thread, part))) for part in parts]
        if stored.digests:
            return self._serde.loads_typed(_decode.decode(_item(self._table, self._thread, stored.digests[0])))
        return self._serde.loads_typed((stored.kind, stored.raw))

    def _add(self, body: bytes) -> bytes:
        digest = _digest(body)
        key = _key(self._thread, digest)
        if self._table.get(key) is None:
            self._table.put(key, body)
        return digest


def digests_of(table: ItemTable, thread: str, values: Iterable[StoredValue]) -> set[bytes]:
    """Return the digests of all items that values are in."""
    found: set[bytes] = set()
    groups: set[bytes] = set()
    for value in values:
        found.update(value.digests)
        if value.is_list:
            groups.update(value.digests)
    found.update(_elements(table, thread, groups))
    return found


def sweep(table: ItemTable, thread: str, used: set[bytes]) -> None:
    """Delete the items of values of a thread but those that are used."""
    ends = {digest.hex().encode() for digest in used}
    for key in table.keys(item_key("langgraph", "value", thread)):
        if key[-2 * _DIGEST - 1 : -1] not in ends:
            table.delete(key)


def _elements(table: ItemTable, thread: str, groups: Iterable[bytes]) -> Iterator[bytes]:
    for group in groups:
        joined = _item(table, thread, group)
        yield from (joined[at : at + _DIGEST] for at in range(0, len(joined), _DIGEST))


def _item(table: ItemTable, thread: str, digest: bytes) -> bytes:
    body = table.get(_key(thread, digest))
    if body is None:
        raise StoreDamagedError(f"a value of thread {thread[:60]!r} is not in the store", fix="Restore a backup")
    return body


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()


def _key(thread: str, digest: bytes) -> bytes:
    return item_key("langgraph", "value", thread, digest.hex())
