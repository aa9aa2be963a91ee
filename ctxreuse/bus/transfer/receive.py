"""The receiving side of one fetch: memory of its blocks, and the checks before an engine reads them."""

from __future__ import annotations

import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Container, Sequence

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import MAX_HEADER, BlockView, Layout, block_layout, parse
from ctxreuse.block.levels import EXACT, LevelName, parse_level
from ctxreuse.bus.protocol.messages import Have, Piece
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.errors import FormatError, LinkDownError, ProtocolError
from ctxreuse.identity.keys import KEY_BYTES, ROOT

__all__ = ["FetchBuffer", "ReceiveBuffer", "part_offsets"]

#: Fields of a block's prelude that are needed before memory is allocated: header length, total length, header checksum.
_SIZES = struct.Struct("<12xIQ8s")
#: Bytes that a header may have besides what its layout, tokens and keys need: level, numbers, an engine's extra.
_HEADER_SLACK = 4096
#: Bytes of blocks that share one array, which any view of them keeps alive.
_SLAB = 64 << 20
#: Bytes that the stream of a plane may have beyond the plane itself: heads of its cells, where nothing could be saved.
_CODED_SLACK = 4096
_ALIGN, _PAGE, _PAGE_HEADER = 64, 4096, 16
#: Bytes of a state.
_STATE_LIMIT = 1 << 30


def part_offsets(view: BlockView) -> tuple[int, ...]:
    """Return byte offsets of a block's parts, ending with its size.

    Part 0 is the head (all before the first plane), part 1 + i the planes of the i-th distinct layer with their
    padding. About 2 µs for 30 layers.
    """
    layout = view.layout
    start = view.offset(layout.planes[0].layer, layout.planes[0].role)
    return (0, *[start + at for at in layout.layer_offsets], len(view.buffer))


class _Item:
    """One block or state; its bytes arrive from first to last."""

    __slots__ = ("bytes", "check", "filled", "offsets", "parts", "start", "view")

    def __init__(self) -> None:
        self.bytes = memoryview(b"")  # of its size, once that is known
        self.filled = self.parts = self.start = 0
        self.check = b""
        self.view: BlockView | None = None
        self.offsets: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        return 0 < self.filled == len(self.bytes)


def _allowed(level: str, levels: Container[str], base: str) -> bool:
    """Return True for ``exact`` and for what is among ``levels``.

    ``base``: the level of the block to refine, "" for a block that stands alone. A refinement is allowed if it leads
    from that to one of ``levels``.
    """
    try:
        name = parse_level(level)
    except FormatError:
        return False
    if not base:
        return level == EXACT or (level in levels and not name.base)
    fine, coarse = LevelName(name.name, name.profile), LevelName(name.base, name.profile)
    return bool(name.base) and str(fine) in levels and str(coarse) == base


def _laid_out(view: BlockView, layout: Layout) -> bool:
    """Return True for planes as ``layout`` has them, or, at a coded level, one stream of bytes in place of each."""
    if view.header.level == EXACT:
        return view.header.planes == layout.encoded
    ours, theirs = layout.planes, view.layout.planes
    return len(ours) == len(theirs) and all(
        (p.layer, p.role, "uint8", 1) == (q.layer, q.role, q.dtype, len(q.shape)) for p, q in zip(ours, theirs)
    )


class ReceiveBuffer:
    """Bytes of one transfer as they arrive, until it ends. Any thread may call."""

    def __init__(self) -> None:
        #: Called once by `stop`, in its caller's thread.
        self.on_stop: Callable[[], None] | None = None
        self._ended: str | None = None
        self._changed = threading.Condition()

    @property
    def ended(self) -> str | None:
        """None while more may come; then "" (complete and right) or why it ended early."""
        return self._ended

    def end(self, reason: str) -> None:
        """End the transfer with ``reason``; the first end counts."""
        with self._changed:
            if self._ended is None:
                self._ended = reason
            self._changed.notify_all()

    def stop(self) -> None:
        """See `Fetch.stop`; the end is ``stopped`` unless there was one before."""
        with self._changed:
            if self._ended is not None:
                return
            self._ended = "stopped"
            self._changed.notify_all()
        if self.on_stop is not None:
            self.on_stop()


class FetchBuffer(ReceiveBuffer):
    """Blocks of one fetch as they arrive; a `ctxreuse.bus.remote.Fetch`.

    One thread, the link's, writes; any others wait and read. A block that arrives whole stays where it arrived; memory
    of others is allocated once their first bytes are here and the lengths in them are what ``space`` implies (for a
    state: at most `_STATE_LIMIT` bytes). Each head is
    compared with the request as soon as it is complete: model space, key, parent, token ids, position, layout, level.
    Planes are not verified: the reader compares checksums. A peer that sends something else ends the fetch with
    ``foreign``, one that sends a level that was not allowed with ``level``.

    Args:
        request: The blocks. A prefill's come in another order.
        keys: Keys on this link, from the context's start to the last wanted block.
        refine: Refinements of the blocks may follow as further items; `finish` says that no more will.
        on_done: Called with the seconds until the first bytes and until the end, once all is complete.
    """

    def __init__(
        self,
        request: FetchRequest,
        keys: Sequence[bytes],
        *,
        refine: bool = False,
        on_done: Callable[[float, float], None] | None = None,
    ) -> None:
        super().__init__()
        self._on_done, self._began, self._first = on_done, time.monotonic(), 0.0
        space, tokens, first = request.space, request.tokens, request.first
        step = space.block_tokens
        if not 0 <= first < len(keys) or len(tokens) < len(keys) * step:
            raise ValueError(f"{len(keys)} blocks from {first} on with {len(tokens)} tokens")
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"keys must have {KEY_BYTES} bytes")
        self.request, self.keys = request, tuple(keys[first:])
        self.space, self.first, self.order = space, first, request.order
        self.wants_state = request.state
        self.levels, self.refines = frozenset(request.levels.levels), refine
        self._parents = (keys[first - 1] if first else ROOT, *self.keys[:-1])
        self._tokens = np.ascontiguousarray(tokens[first * step : len(keys) * step], "<i4").tobytes()
        self._layout = block_layout(space)
        self._header_limit = (
            len(self._layout.encoded) + 8 * len(self._layout.planes) + 4 * step + 3 * KEY_BYTES + _HEADER_SLACK
        )
        self._items = [_Item() for _ in range(self.count + request.state + refine * self.count)]
        #: Blocks whose part p is complete; part 0 counts when its head has been checked.
        self._whole = [0] * (1 + len(self._layout.layer_offsets))
        self._tail = 0
        self._slab = np.empty(0, np.uint8)
        self._placed = 0
        self.received = 0
        self.duplicates = 0

    def context_tokens(self) -> bytes:
        """Return the token ids of the context from its start to the end of the last block, int32 little-endian."""
        end = (self.first + self.count) * self.space.block_tokens
        return np.ascontiguousarray(self.request.tokens[:end], "<i4").tobytes()

    # ---- the link's thread ----

    def write(self, pieces: Sequence[Piece], payload: memoryview) -> int:
        """Write one payload, the concatenated ``pieces``; returns the number of bytes that were new. Its memory, which
        must not change, is kept where blocks came whole.

        Bytes that are here already are compared and counted in ``duplicates``. After the end nothing is written. Raises
        ProtocolError for a gap (a lost message: the fetch may be resumed) and for wrong bytes (which end the fetch).
        """
        if self._ended is not None:
            return 0
        at = fresh = 0
        for number, start, nbytes in pieces:
            fresh += self._place(number, start, payload[at : at + nbytes])
            at += nbytes
        self._first = self._first or time.monotonic()
        if not self.refines and self._items_whole():
            self.end("")
        with self._changed:
            self._changed.notify_all()
        return fresh

    def have(self) -> tuple[Have, ...]:
        """Return what is here of each item, for resuming: (item, bytes, header checksum)."""
        return tuple((i, item.filled, item.check) for i, item in enumerate(self._items) if item.filled)

    def finish(self) -> None:
        """End the fetch: the peer has sent all that it has."""
        self.end("" if self._items_whole() else "short")

    def end(self, reason: str) -> None:
        """See `ReceiveBuffer.end`."""
        ended = self._ended
        super().end(reason)
        if ended is None and self._ended == "" and self._on_done is not None:
            done, self._on_done = self._on_done, None
            done(self._first - self._began, time.monotonic() - self._began)

    def _items_whole(self) -> bool:
        return self._tail == self.count and (not self.wants_state or self._items[self.count].whole)

    def _place(self, number: int, start: int, data: memoryview) -> int:
        """Write bytes of one item; returns how many were new."""
        if number >= len(self._items):
            raise self._foreign(f"item {number} of {len(self._items)}")
        item = self._items[number]
        if start > item.filled:
            lost = f"{start - item.filled} bytes of item {number} are missing"
            raise ProtocolError(lost, where=self.keys[0].hex()[:16], fix="The link is opened again and asks for them")
        if not item.bytes:
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
        if item.bytes is not data:
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
            fits = 0 < header <= MAX_HEADER and start <= total <= _STATE_LIMIT
        if not fits:
            raise self._foreign(f"item {number} says it has {total} bytes, {header} of them header")
        if len(data) == total:
            item.bytes = data
        else:
            item.bytes = (self._memory(total) if number < self.count else np.empty(total, np.uint8)).data
        item.start, item.check = start, check

    def _memory(self, total: int) -> npt.NDArray[np.uint8]:
        """Allocate a block. Blocks of a space are equally large (but for a header that grows by a page) and share
        arrays: numpy asks for huge pages from 4 MiB on, which makes the first write six times as fast."""
        stride = -(-total // _PAGE) * _PAGE
        if self._slab.nbytes < stride:
            blocks = min(self.count - self._placed, max(1, _SLAB // stride))
            self._slab = np.empty(blocks * stride, np.uint8)
        room, self._slab = self._slab[:total], self._slab[stride:]
        self._placed += 1
        return room

    def _head(self, item: _Item, number: int) -> BlockView:
        """Check an item's head; returns its view."""
        try:
            view = parse(item.bytes, space=self.space.digest)
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
        if base is None or not _allowed(header.level, self.levels, base.header.level if base is not view else ""):
            raise self._foreign(f"item {number} has level {header.level!r}", "level")
        if not state and (not _laid_out(view, self._layout) or header.rope_at not in (-1, end - step)):
            raise self._foreign(f"item {number} has other planes, or was rotated from {header.rope_at} on")
        return view

    def _block(self, number: int) -> int:
        """Return the block that an item is, or belongs to."""
        if number < self.count:
            return number
        return self.count - 1 if number == self.count and self.wants_state else number - self.count - self.wants_state

    def _count(self, item: _Item, number: int) -> None:
        with self._changed:
            before, item.parts = item.parts, bisect_right(item.offsets, item.filled) - 1
            count = self.count
            if number < count:
                for part in range(before, item.parts):
                    self._whole[part] += 1
            while self._tail < count and self._items[count - 1 - self._tail].whole:
                self._tail += 1

    def _foreign(self, what: str, reason: str = "foreign") -> ProtocolError:
        self.end(reason)
        return ProtocolError(f"a peer sent bytes that were not requested: {what}", where=self.keys[0].hex()[:16])

    # ---- any thread ----

    @property
    def count(self) -> int:
        """See `Fetch.count`."""
        return len(self.keys)

    def heads(self, timeout: float) -> Sequence[BlockView]:
        """See `Fetch.heads`."""
        self._wait(lambda: self._whole[0] == self.count, timeout, "heads")
        return self._views(self.count)

    def wait_layer(self, layer: int, timeout: float) -> None:
        """See `Fetch.wait_layer`; returns at once if blocks have no planes of ``layer``."""
        part = self._layout.part_of.get(layer)
        if part is not None:
            self._wait(lambda: self._whole[part] == self.count, timeout, f"layer {layer}")

    def tail(self, least: int = 0, timeout: float = 0.0) -> int:
        """See `Fetch.tail`."""
        with self._changed:
            self._changed.wait_for(lambda: self._tail >= least or self._ended is not None, timeout)
            return self._tail

    def views(self, last: int) -> Sequence[BlockView]:
        """See `Fetch.views`. Raises ValueError if they are not whole."""
        if not 0 <= last <= self._tail:
            raise ValueError(f"the last {last} blocks are requested, {self._tail} are complete")
        return self._views(last)

    def refinements(self, last: int) -> list[BlockView | None]:
        """See `Fetch.refinements`."""
        items = self._items[self.count + self.wants_state :][-last:] if self.refines and last else []
        return [item.view if item.whole else None for item in items] or [None] * last

    def state(self, timeout: float) -> BlockView | None:
        """See `Fetch.state`."""
        if not self.wants_state:
            return None
        item = self._items[self.count]
        with self._changed:
            self._changed.wait_for(lambda: item.whole or self._ended is not None, timeout)
            return item.view if item.whole else None

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
        """Raise AssertionError if counters and bytes disagree."""
        with self._changed:
            blocks = self._items[: self.count]
            assert self.refines or len(self._items) == self.count + self.wants_state
            for item in self._items:
                assert item.filled <= len(item.bytes)
                assert (item.view is not None) == (item.filled >= item.start > 0)
                known = sum(item.filled >= end for end in item.offsets[1:])
                assert item.parts == known, f"{item.parts} parts counted, {known} are whole"
            for part, counted in enumerate(self._whole):
                assert counted == sum(item.parts > part for item in blocks)
            gap = next((i for i, item in enumerate(reversed(blocks)) if not item.whole), self.count)
            assert self._tail == gap
            assert self.received == sum(item.filled for item in self._items)
            assert self._ended != "" or self._items_whole()
