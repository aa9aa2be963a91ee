"""Blocks of a store for one peer: proven to be its tenant's, copied out of short reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence

from ctxreuse.block import BlockView, Kind
from ctxreuse.bus.tenants import Line
from ctxreuse.bus.transfer import part_offsets
from ctxreuse.errors import StoreError
from ctxreuse.keys import prefix_key
from ctxreuse.levels import EXACT
from ctxreuse.store.base import Reader, WholeStore

__all__ = ["StoreSupply", "proven"]


def proven(view: BlockView, line: Line, salt: bytes) -> bool:
    """True if this block's key is what the tenant's salt makes of its space, parent and token ids."""
    header = view.header
    return header.space == line.space and header.key == prefix_key(header.space, salt, header.parent, view.tokens)


class StoreSupply:
    """See `ctxreuse.bus.base.Encodable` and `ctxreuse.bus.base.Gather`. Holds the heads of blocks, nothing else.

    A block that is evicted meanwhile is a LookupError, one that was replaced by another encoding too. Each payload is
    one short read of the store, out of which its pieces are copied once, to where they are sent from.
    """

    def __init__(self, store: WholeStore, line: Line, salt: bytes, keys: Sequence[bytes], state: bool) -> None:
        self._store, self._line, self._salt = store, line, salt
        self._items: list[tuple[bytes, Kind]] = [(key, "block") for key in keys]
        if state:
            self._items.append((keys[-1], "state"))
        self.count = len(self._items)
        self._offsets: dict[int, tuple[int, ...]] = {}
        self._heads: dict[int, bytes] = {}
        self._levels: Container[str] = (EXACT,)
        self._coded = False
        self._closed = False

    def allow(self, levels: Container[str]) -> None:
        """See `Encodable.allow`."""
        self._levels, self._coded = levels, True

    def sealed(self, item: int) -> memoryview:
        """See `Encodable.sealed`."""
        with self._reading() as reader:
            view = self._peek(reader, item)
            if not proven(view, self._line, self._salt):
                raise LookupError(view.header.key.hex()[:16])
            return memoryview(bytes(view.buffer))

    def parts(self, item: int) -> tuple[int, ...]:
        """See `Supply.parts`; reads the head."""
        if item not in self._offsets:
            with self._reading() as reader:
                self._look(reader, item)
        return self._offsets[item]

    def read(self, item: int, start: int, stop: int) -> memoryview | bytes:
        """See `Supply.read`."""
        head = self._heads.get(item, b"")
        if stop <= len(head):
            return memoryview(head)[start:stop]
        with self._reading() as reader:
            return bytes(self._look(reader, item).buffer[start:stop])

    def gather(self, pieces: Sequence[tuple[int, int, int]], room: Callable[[int], memoryview]) -> memoryview:
        """See `Gather`."""
        data, at = room(sum(nbytes for _, _, nbytes in pieces)), 0
        reader: Reader | None = None
        with contextlib.ExitStack() as stack:
            for item, start, nbytes in pieces:
                part = memoryview(self._heads.get(item, b""))[start : start + nbytes]
                if len(part) < nbytes:
                    reader = reader or stack.enter_context(self._reading())
                    part = self._look(reader, item).buffer[start : start + nbytes]
                data[at : at + nbytes] = part
                at += nbytes
        return data

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Reader]:
        if self._closed:
            raise LookupError("the fetch is closed")
        try:
            with self._store.read() as reader:
                yield reader
        except StoreError as error:
            raise LookupError(str(error)) from None

    def _look(self, reader: Reader, item: int) -> BlockView:
        """An item as it is held now, which it must have been from the start."""
        view, head = self._peek(reader, item), self._heads.get(item)
        if head is None:
            if not proven(view, self._line, self._salt):
                raise LookupError(view.header.key.hex()[:16])
            # Whatever cannot be sent as it is may still be encoded: only then are its parts of no interest.
            if view.header.level not in self._levels and not self._coded:
                raise LookupError(f"held at {view.header.level}")
            self._offsets[item] = part_offsets(view)
            self._heads[item] = bytes(view.buffer[: view.start])
        elif view.buffer[: view.start] != head:
            raise LookupError(self._items[item][0].hex()[:16])
        return view

    def _peek(self, reader: Reader, item: int) -> BlockView:
        view = reader.peek(*self._items[item])
        if view is None:
            raise LookupError(self._items[item][0].hex()[:16])
        return view

    def watch(self, wake: Callable[[], None]) -> None:
        """All items are ready from the start."""

    def close(self) -> None:
        """See `Supply.close`."""
        self._closed = True
        self._heads.clear()
        self._offsets.clear()
