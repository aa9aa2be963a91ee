"""Blocks of a store for one peer: proven to be its tenant's, copied out of short reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ctxreuse.block import BlockView, Kind
from ctxreuse.bus.tenants import Line
from ctxreuse.bus.transfer import part_offsets
from ctxreuse.errors import StoreError
from ctxreuse.keys import prefix_key
from ctxreuse.store.base import WholeStore

__all__ = ["Shelf", "StoreSupply", "proven"]


def proven(view: BlockView, line: Line, salt: bytes) -> bool:
    """True if this block's key is what the tenant's salt makes of its space, parent and token ids."""
    header = view.header
    return header.space == line.space and header.key == prefix_key(header.space, salt, header.parent, view.tokens)


class Shelf:
    """Bytes that open fetches may keep in memory together. One thread calls.

    In layer order each block is read once a layer. Out of the store that costs a search, a parse and a touch of every
    page of the block each time (75 µs for 3 MB, as much as copying 1 MB), so a fetch that finds room keeps its blocks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.taken = capacity, 0

    def take(self, nbytes: int) -> bool:
        """Reserve; False if there is no room."""
        if self.taken + nbytes > self.capacity:
            return False
        self.taken += nbytes
        return True

    def give(self, nbytes: int) -> None:
        """Give a reservation back."""
        self.taken -= nbytes


class StoreSupply:
    """See `ctxreuse.bus.base.Supply`. ``nbytes`` is what the items take together.

    A block that is evicted meanwhile is a LookupError, one that was replaced by another encoding too.
    """

    def __init__(
        self, store: WholeStore, shelf: Shelf, line: Line, salt: bytes, keys: Sequence[bytes], state: bool, nbytes: int
    ) -> None:
        self._store, self._shelf, self._line, self._salt = store, shelf, line, salt
        self._items: list[tuple[bytes, Kind]] = [(key, "block") for key in keys]
        if state:
            self._items.append((keys[-1], "state"))
        self.count = len(self._items)
        self._offsets: dict[int, tuple[int, ...]] = {}
        self._heads: dict[int, bytes] = {}
        self._kept: dict[int, bytes] = {}
        self._reserved = nbytes if shelf.take(nbytes) else 0
        self._closed = False

    def parts(self, item: int) -> tuple[int, ...]:
        """See `Supply.parts`; reads the head."""
        offsets = self._offsets.get(item)
        if offsets is None:
            self._read(item, 0, 0)
            offsets = self._offsets[item]
        return offsets

    def read(self, item: int, start: int, stop: int) -> memoryview | bytes:
        """See `Supply.read`."""
        offsets = self.parts(item)
        head = self._heads[item]
        if stop <= len(head):
            return memoryview(head)[start:stop]
        kept = self._kept.get(item)
        if kept is not None:
            return memoryview(kept)[start:stop]
        if not self._reserved:
            return self._read(item, start, stop)
        kept = self._kept[item] = self._read(item, 0, offsets[-1])
        return memoryview(kept)[start:stop]

    def _read(self, item: int, start: int, stop: int) -> bytes:
        if self._closed:
            raise LookupError("the fetch is closed")
        key, kind = self._items[item]
        try:
            with self._store.read() as reader:
                view = reader.peek(key, kind)
                if view is None:
                    raise LookupError(key.hex()[:16])
                try:
                    if item not in self._heads:
                        if not proven(view, self._line, self._salt):
                            raise LookupError(key.hex()[:16])
                        self._offsets[item] = part_offsets(view)
                        self._heads[item] = bytes(view.buffer[: view.start])
                    elif view.buffer[: view.start] != self._heads[item]:
                        raise LookupError(key.hex()[:16])
                    return bytes(view.buffer[start:stop])
                finally:
                    del view
        except StoreError as error:
            raise LookupError(str(error)) from None

    def watch(self, wake: Callable[[], None]) -> None:
        """All items are ready from the start."""

    def close(self) -> None:
        """See `Supply.close`."""
        self._closed = True
        self._shelf.give(self._reserved)
        self._reserved = 0
        self._kept.clear()
        self._heads.clear()
        self._offsets.clear()
