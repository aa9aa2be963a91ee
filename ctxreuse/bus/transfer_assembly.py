"""The receiving side of one fetch: memory of its blocks, and what can be checked before an engine reads them."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from ctxreuse.block import MAX_HEADER, BlockView, Layout, block_layout, parse
from ctxreuse.bus.transfer_levels import allowed, laid_out
from ctxreuse.bus.wire import Have, Piece
from ctxreuse.errors import FormatError, LinkDownError, ProtocolError
from ctxreuse.keys import KEY_BYTES, ROOT, Tokens
from ctxreuse.model import ModelSpace
from ctxreuse.runtime.remote import Order

__all__ = ["Assembly", "Options", "part_offsets"]

#: What of a block's prelude must be known before memory is allocated: header length, total length, header checksum.
_SIZES = struct.Struct("<12xIQ8s")
#: Bytes that a header may have besides what its layout, tokens and keys need: level, numbers, an engine's extra.
_HEADER_SLACK = 4096
#: Bytes of blocks that share one array: what is kept alive together by any view of them.
_SLAB = 64 << 20
#: Bytes that the stream of a plane may have beyond the plane itself: heads of its cells, where nothing could be saved.
_CODED_SLACK = 4096
_ALIGN, _PAGE, _PAGE_HEADER = 64, 4096, 16


@lru_cache(maxsize=1024)
def _offsets(layout: Layout, start: int, total: int) -> tuple[int, ...]:
    firsts = [layout.offsets[next(run)[0]] for _, run in groupby(enumerate(layout.planes), lambda p: p[1].layer)]
    return (0, *(start + at for at in firsts), total)


def part_offsets(view: BlockView) -> tuple[int, ...]:
    """Byte offsets of a block's parts: part p is ``[offsets[p], offsets[p + 1])``.

    Part 0 is the head (all before the first plane), part 1 + i the planes of the i-th distinct layer with their
    padding; the last offset is the total size. Equal layouts and sizes give the same tuple; well below 1 µs then.
    """
    first = view.layout.planes[0]
    return _offsets(view.layout, view.offset(first.layer, first.role), len(view.buffer))


class _Item:
    """One block (or the state) on its way: its bytes arrive from first to last."""

    __slots__ = ("buffer", "bytes", "check", "filled", "offsets", "parts", "start", "view")

    def __init__(self) -> None:
        self.buffer: npt.NDArray[np.uint8] | None = None
        self.bytes = memoryview(b"")
        self.filled = self.parts = self.start = 0
        self.check = b""
        self.view: BlockView | None = None
        self.offsets: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        return self.buffer is not None and self.filled == len(self.bytes)


class Options(TypedDict, total=False):
    """What else an `Assembly` is told."""

    order: Order
    state: bool
    levels: Collection[str]
    refine: bool


class Assembly:
    """Blocks of one fetch as they arrive; a `ctxreuse.runtime.remote.Fetch`.

    One thread, the link's, writes; any others wait and read. Memory of a block is allocated when its first bytes are
    here and the lengths in them are what ``space`` implies (exactly, for blocks; at most ``state_limit`` bytes for the
    state). Each head is compared with what was asked for as soon as it is whole: model space, key, parent, token ids,
    position, layout, level. Planes are not verified: who reads them compares checksums. A peer that sends something
    else ends the fetch with ``foreign``, one that sends a level that was not allowed with ``level``.

    ``keys``: of the wanted blocks, on this link; ``parent``: the key before the first (ROOT for block 0); ``tokens``
    int32 [blocks x block_tokens]: their ids; ``first``: index of the first block in its context. With ``state`` the
    state at the end of the last block is item ``count``. ``levels``: at which blocks may come, besides ``exact``, as
    heads spell them; a coded block is at most a little larger than the raw one. ``refine``: refinements of the blocks
    may follow as further items; `finish` says that no more of them will. ``on_stop`` is called once by `stop`, in its
    caller's thread.
    """

    def __init__(
        self,
        space: ModelSpace,
        keys: Sequence[bytes],
        tokens: Tokens,
        *,
        first: int = 0,
        parent: bytes = ROOT,
        order: Order = "layers",
        state: bool = False,
        state_limit: int = 1 << 30,
        levels: Collection[str] = (),
        refine: bool = False,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        if not keys or len(tokens) != len(keys) * space.block_tokens or first < 0:
            raise ValueError(f"{len(keys)} blocks from {first} on with {len(tokens)} tokens")
        if any(len(key) != KEY_BYTES for key in (parent, *keys)):
            raise ValueError(f"keys must have {KEY_BYTES} bytes")
        self.space, self.keys, self.first, self.order = space, tuple(keys), first, order
        self.wants_state, self.on_stop = state, on_stop
        self.levels, self.refines = frozenset(levels), refine
        self._parents = (parent, *keys[:-1])
        self._tokens = np.ascontiguousarray(tokens, "<i4").tobytes()
        self._layout = block_layout(space)
        layers = [layer for layer, _ in groupby(plane.layer for plane in self._layout.planes)]
        self._part_of = {layer: 1 + i for i, layer in enumerate(layers)}
        self._header_limit = (
            len(self._layout.encoded)
            + 8 * len(self._layout.planes)
            + 4 * space.block_tokens
            + 3 * KEY_BYTES
            + _HEADER_SLACK
        )
        self._state_limit = state_limit
        self._items = [_Item() for _ in range(len(keys) + state + refine * len(keys))]
        #: Blocks whose part p is whole; part 0 counts when its head has been checked.
        self._whole = [0] * (1 + len(layers))
        self._tail = 0
        self._slab = np.empty(0, np.uint8)
        self._placed = 0
        self._ended: str | None = None
        self._changed = threading.Condition()
        self.received = 0
        self.duplicates = 0

    # ---- the link's thread ----

    def write(self, pieces: Sequence[Piece], payload: memoryview) -> int:
        """Put the bytes of one payload in their places; the number of bytes that were new.

        ``payload`` holds the pieces in a row and is not kept. Bytes that are here already are compared and counted in
        ``duplicates``. Raises ProtocolError: for a gap (a message was lost: the fetch may be resumed), and for bytes
        that cannot belong here (the fetch has ended then). After the end nothing is written.
        """
        if self._ended is not None:
            return 0
        at = fresh = 0
        for number, start, nbytes in pieces:
            fresh += self._place(number, start, payload[at : at + nbytes])
            at += nbytes
        with self._changed:
            if self._ended is None and not self.refines and self._items_whole():
                self._ended = ""
            self._changed.notify_all()
        return fresh

    def have(self) -> tuple[Have, ...]:
        """What is here of each item, for opening the fetch again: (item, bytes, header checksum)."""
        return tuple((i, item.filled, item.check) for i, item in enumerate(self._items) if item.filled)

    def finish(self) -> None:
        """The peer has sent all that it has."""
        self.end("" if self._items_whole() else "short")

    def end(self, reason: str) -> None:
        """No more will come; ``reason`` is what `ended` says. The first end counts. Any thread."""
        with self._changed:
            if self._ended is None:
                self._ended = reason
            self._changed.notify_all()

    def _items_whole(self) -> bool:
        return self._tail == self.count and (not self.wants_state or self._items[self.count].whole)

    def _place(self, number: int, start: int, data: memoryview) -> int:
        """Bytes of one item; how many were new."""
        if number >= len(self._items):
            raise self._foreign(f"item {number} of {len(self._items)}")
        item = self._items[number]
        if start > item.filled:
            lost = f"{start - item.filled} bytes of item {number} are missing"
            raise ProtocolError(lost, where=self.keys[0].hex()[:16], fix="The link is opened again and asks for them")
        if item.buffer is None:
            self._allocate(item, number, data)
        stop = start + len(data)
        if stop > len(item.bytes):
            raise self._foreign(f"item {number} of {len(item.bytes)} bytes gets some at {stop}")
        known = min(item.filled, stop) - start
        if known:
            self.duplicates += known
            if item.bytes[start : start + known] != data[:known]:
                raise self._foreign(f"item {number} came twice and differs")
        if stop <= item.filled:
            return 0
        item.bytes[item.filled : stop] = data[known:]
        before, item.filled = item.filled, stop
        self.received += stop - before
        if item.view is None and stop >= item.start:
            try:
                item.view = self._head(item, number)
            except ProtocolError:
                self.received -= stop
                self._items[number] = _Item()
                raise
            item.offsets = part_offsets(item.view)
        if item.view is not None:
            self._count(item, number)
        return stop - before

    def _allocate(self, item: _Item, number: int, data: memoryview) -> None:
        if len(data) < _SIZES.size + 8:
            raise self._foreign(f"item {number} begins with {len(data)} bytes")
        header, total, check = _SIZES.unpack_from(data)
        start = -(-(32 + header) // _ALIGN) * _ALIGN
        if number != self.count or not self.wants_state:
            exact = -(-(start + self._layout.nbytes + _PAGE_HEADER) // _PAGE) * _PAGE - _PAGE_HEADER
            coded = self.levels and start <= total <= exact + _CODED_SLACK * len(self._layout.planes)
            fits = 0 < header <= self._header_limit and (total == exact or coded)
        else:
            fits = 0 < header <= MAX_HEADER and start <= total <= self._state_limit
        if not fits:
            raise self._foreign(f"item {number} says it has {total} bytes, {header} of them header")
        item.buffer = self._memory(total) if number < self.count else np.empty(total, np.uint8)
        item.bytes, item.start, item.check = item.buffer.data, start, check

    def _memory(self, total: int) -> npt.NDArray[np.uint8]:
        """Room for a block. Blocks of a space are equally large (but for a header that grows by a page), so that they
        share arrays: numpy asks for huge pages from 4 MiB on, which makes the first write of them six times as fast."""
        stride = -(-total // _PAGE) * _PAGE
        if self._slab.nbytes < stride:
            blocks = min(self.count - self._placed, max(1, _SLAB // stride))
            self._slab = np.empty(blocks * stride, np.uint8)
        room, self._slab = self._slab[:total], self._slab[stride:]
        self._placed += 1
        return room

    def _head(self, item: _Item, number: int) -> BlockView:
        """The view of an item whose head is here, after all checks of it."""
        assert item.buffer is not None
        try:
            view = parse(item.buffer, space=self.space.digest)
        except FormatError as error:
            raise self._foreign(f"item {number}: {error.what}") from None
        header, state = view.header, number == self.count and self.wants_state
        block, step = self._block(number), self.space.block_tokens
        end = (self.first + block + 1) * step
        wanted = ("state" if state else "block", self.keys[block], self._parents[block], end)
        if (header.kind, header.key, header.parent, header.end) != wanted:
            raise self._foreign(f"item {number} is the {header.kind} {header.key.hex()[:16]} that ends at {header.end}")
        if header.tokens != self._tokens[4 * block * step : 4 * (block + 1) * step]:
            raise self._foreign(f"item {number} is of other tokens")
        base = self._items[block].view if number >= self.count + self.wants_state else view
        if base is None or not allowed(header.level, self.levels, base.header.level if base is not view else ""):
            raise self._foreign(f"item {number} has level {header.level!r}", "level")
        if not state and (not laid_out(view, self._layout) or header.rope_at not in (-1, end - step)):
            raise self._foreign(f"item {number} has other planes, or was rotated from {header.rope_at} on")
        return view

    def _block(self, number: int) -> int:
        """Number of the block that an item is, or belongs to."""
        if number < self.count:
            return number
        return self.count - 1 if number == self.count and self.wants_state else number - self.count - self.wants_state

    def _count(self, item: _Item, number: int) -> None:
        with self._changed:
            while item.parts < len(item.offsets) - 1 and item.filled >= item.offsets[item.parts + 1]:
                if number < self.count:
                    self._whole[item.parts] += 1
                item.parts += 1
            while self._tail < self.count and self._items[self.count - 1 - self._tail].whole:
                self._tail += 1

    def _foreign(self, what: str, reason: str = "foreign") -> ProtocolError:
        self.end(reason)
        return ProtocolError(f"a peer sent what was not asked for: {what}", where=self.keys[0].hex()[:16])

    # ---- any thread ----

    @classmethod
    def of_context(
        cls, space: ModelSpace, keys: Sequence[bytes], tokens: Tokens, first: int, **options: Unpack[Options]
    ) -> Assembly:
        """For blocks ``first`` to the last of ``keys``; ``keys`` and ``tokens`` are of the context from its start."""
        ids = tokens[first * space.block_tokens : len(keys) * space.block_tokens]
        parent = keys[first - 1] if first else ROOT
        return cls(space, keys[first:], ids, first=first, parent=parent, **options)

    @property
    def count(self) -> int:
        """Number of blocks that were asked for."""
        return len(self.keys)

    @property
    def ended(self) -> str | None:
        """None while more may come; then ``""`` (all is here) or why it ended early."""
        return self._ended

    def heads(self, timeout: float) -> Sequence[BlockView]:
        """Views of all blocks, in order, once every head is here; LinkDownError after ``timeout`` seconds or at an
        early end."""
        self._wait(lambda: self._whole[0] == self.count, timeout, "heads")
        return self._views(self.count)

    def wait_layer(self, layer: int, timeout: float) -> None:
        """Return when the planes of ``layer`` are here for all blocks (at once if blocks have none); LinkDownError
        after ``timeout`` seconds or at an early end."""
        part = self._part_of.get(layer)
        if part is not None:
            self._wait(lambda: self._whole[part] == self.count, timeout, f"layer {layer}")

    def tail(self, least: int = 0, timeout: float = 0.0) -> int:
        """How many blocks at the end are whole, without a gap; waits until there are ``least``. Never raises."""
        with self._changed:
            self._changed.wait_for(lambda: self._tail >= least or self._ended is not None, timeout)
            return self._tail

    def views(self, last: int) -> Sequence[BlockView]:
        """Views of the last ``last`` blocks; ValueError if they are not whole."""
        if not 0 <= last <= self._tail:
            raise ValueError(f"the last {last} blocks are asked for, {self._tail} are whole")
        return self._views(last)

    def refinements(self, last: int) -> list[BlockView | None]:
        """Of the last ``last`` blocks, in order: their refinements, None for each that is not here whole (yet)."""
        items = self._items[self.count + self.wants_state :][-last:] if self.refines and last else []
        return [item.view if item.whole else None for item in items] or [None] * last

    def state(self, timeout: float) -> BlockView | None:
        """The states at the end of the last block, if they were asked for and are here whole in time."""
        if not self.wants_state:
            return None
        item = self._items[self.count]
        with self._changed:
            self._changed.wait_for(lambda: item.whole or self._ended is not None, timeout)
            return item.view if item.whole else None

    def stop(self) -> None:
        """Want no more: the end is ``stopped`` unless there was one before. Idempotent; what is here stays."""
        with self._changed:
            if self._ended is not None:
                return
            self._ended = "stopped"
            self._changed.notify_all()
        if self.on_stop is not None:
            self.on_stop()

    def _views(self, last: int) -> list[BlockView]:
        return [item.view for item in self._items[self.count - last : self.count] if item.view is not None]

    def _wait(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        with self._changed:
            while not done():
                if self._ended is not None:
                    raise LinkDownError(f"the fetch ended before its {what} were here", where=self._ended or "whole")
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    if done():
                        return
                    raise LinkDownError(f"{what} did not arrive within {timeout:.3g} s")

    def check(self) -> None:
        """Raise AssertionError if the books do not fit the bytes."""
        with self._changed:
            blocks = self._items[: self.count]
            assert self.refines or len(self._items) == self.count + self.wants_state
            for item in self._items:
                assert item.filled <= len(item.bytes)
                assert (item.view is not None) == (item.buffer is not None and item.filled >= item.start)
                known = sum(item.filled >= end for end in item.offsets[1:])
                assert item.parts == known, f"{item.parts} parts counted, {known} are whole"
            for part, counted in enumerate(self._whole):
                assert counted == sum(item.parts > part for item in blocks)
            gap = next((i for i, item in enumerate(reversed(blocks)) if not item.whole), self.count)
            assert self._tail == gap
            assert self.received == sum(item.filled for item in self._items)
            assert self._ended != "" or self._items_whole()
