"""Stored blocks for one peer: proven to be its tenant's, copied in short reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence

from ctxreuse.block.format import BlockView, Kind
from ctxreuse.block.levels import EXACT
from ctxreuse.bus.protocol.base import EncodableSource
from ctxreuse.bus.protocol.messages import Piece
from ctxreuse.bus.transfer.receive import part_offsets
from ctxreuse.errors import StoreError
from ctxreuse.identity.keys import prefix_key
from ctxreuse.peer.serve.owners import Namespace
from ctxreuse.store.base import Reader, Store

__all__ = ["StoreSource", "proven"]

#: Heads are read for so many items at once, as long as less than so many bytes were copied with them.
_AHEAD, _COPIED = 4, 256 << 10


def proven(view: BlockView, namespace: Namespace, salt: bytes) -> bool:
    """Return True if a block's key is the hash of its space, the tenant's salt, parent and token ids."""
    header = view.header
    return header.space == namespace.space and header.key == prefix_key(header.space, salt, header.parent, view.tokens)


class StoreSource(EncodableSource):
    """Stored blocks; keeps their heads in memory.

    Raises LookupError for a block that is evicted or re-encoded meanwhile. What goes in one payload is copied when its
    head is read, which saves another read; any other payload is one short read of the store, out of which its pieces
    are copied once, to where they are sent from.
    """

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        salt: bytes,
        keys: Sequence[bytes],
        state: bool,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_close`` is called once, when the transfer has ended."""
        self._store, self._namespace, self._salt = store, namespace, salt
        self._items: list[tuple[bytes, Kind]] = [(key, "block") for key in keys]
        if state:
            self._items.append((keys[-1], "state"))
        self.count = len(self._items)
        self._offsets: dict[int, tuple[int, ...]] = {}
        self._heads: dict[int, bytes] = {}
        self._whole: dict[int, memoryview] = {}
        self._copied = self._most = 0
        self._on_close = on_close
        self._levels: Container[str] = (EXACT,)
        self._coded = False
        self._closed = False

    def prepare(self, whole: int, allocate: Callable[[int], memoryview]) -> None:
        """See `BlockSource.prepare`."""
        self._most, self._allocate = whole, allocate

    def allow(self, levels: Container[str]) -> None:
        """See `EncodableSource.allow`."""
        self._levels, self._coded = levels, True

    def sealed(self, item: int) -> memoryview:
        """See `EncodableSource.sealed`."""
        with self._reading() as reader:
            view = self._peek(reader, item)
            if not proven(view, self._namespace, self._salt):
                raise LookupError(view.header.key.hex()[:16])
            return memoryview(bytes(view.buffer))

    def parts(self, item: int) -> tuple[int, ...]:
        """See `BlockSource.parts`; reads the head, and those of the items that go after it."""
        if item not in self._offsets:
            last = item + 1 == self.count or item + 1 in self._offsets
            with self._reading() as reader:
                self._look(reader, item)
                for other in range(item - 1, max(item - _AHEAD, -1), -1) if last else range(item + 1, item + _AHEAD):
                    if other >= self.count or other in self._offsets or self._copied >= _COPIED:
                        break
                    try:
                        self._look(reader, other)
                    except LookupError:
                        break  # what is good goes first
        return self._offsets[item]

    def read(self, item: int, start: int, stop: int) -> memoryview | bytes:
        """See `BlockSource.read`."""
        known = self._known(item, start, stop)
        if known is not None:
            return known
        with self._reading() as reader:
            return bytes(self._look(reader, item).buffer[start:stop])

    def gather(self, pieces: Sequence[Piece], allocate: Callable[[int], memoryview]) -> memoryview:
        """See `BlockSource.gather`."""
        parts = [self._known(item, start, start + nbytes) for item, start, nbytes in pieces]
        if len(parts) == 1 and parts[0] is not None:
            return parts[0]
        data, at = allocate(sum(nbytes for _, _, nbytes in pieces)), 0
        reader: Reader | None = None
        with contextlib.ExitStack() as stack:
            for part, (item, start, nbytes) in zip(parts, pieces):
                if part is None:
                    reader = reader or stack.enter_context(self._reading())
                    part = self._look(reader, item).buffer[start : start + nbytes]
                data[at : at + nbytes] = part
                at += nbytes
        return data

    def _known(self, item: int, start: int, stop: int) -> memoryview | None:
        """Return bytes of an item that are in memory; a copy of the whole is good for its first payload."""
        head, whole = self._heads.get(item, b""), self._whole.pop(item, None)
        if whole is not None:
            self._copied -= len(whole)
            return whole[start:stop]
        return memoryview(head)[start:stop] if stop <= len(head) else None

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
        """Return an item, which must be stored now as it was at the start."""
        view, head = self._peek(reader, item), self._heads.get(item)
        if head is None:
            if not proven(view, self._namespace, self._salt):
                raise LookupError(view.header.key.hex()[:16])
            # A level that may not be sent as it is may still be re-encoded.
            if view.header.level not in self._levels and not self._coded:
                raise LookupError(f"stored at {view.header.level}")
            self._offsets[item] = part_offsets(view)
            self._heads[item] = bytes(view.buffer[: view.start])
            if (size := len(view.buffer)) <= self._most:
                self._whole[item] = self._allocate(size)
                self._whole[item][:] = view.buffer
                self._copied += size
        elif bytes(view.buffer[: view.start]) != head:
            raise LookupError(self._items[item][0].hex()[:16])
        return view

    def _peek(self, reader: Reader, item: int) -> BlockView:
        view = reader.peek(*self._items[item])
        if view is None:
            raise LookupError(self._items[item][0].hex()[:16])
        return view

    def close(self) -> None:
        """See `BlockSource.close`."""
        if not self._closed:
            self._closed = True
            self._heads.clear()
            self._whole.clear()
            self._offsets.clear()
            self._on_close()
