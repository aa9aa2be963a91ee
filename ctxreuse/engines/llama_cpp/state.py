"""The bytes of a sequence as llama.cpp writes and reads them: learned from a small one, built from our rows.

Little endian; what stands in brackets differs between builds and is kept as it was seen::

    u32 magic, i32 sequence
    per KV cache (one; with sliding windows two, the windows' last):
        u32 streams
        per stream: u32 cells, and if it is this sequence's, where alone there are any:
            per cell: i32 position, u32 sequences (1), i32 sequence
            u32 V transposed (0), u32 layers, [u32 …]
            per layer: i32 type, u64 bytes of a row, K rows [cells, heads * dim]
            per layer: i32 type, u64 bytes of a row, V rows [cells, heads * dim]
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import FormatError

__all__ = ["MOST_STREAMS", "LlamaState", "StateLayout"]

#: Streams of a context, at most.
MOST_STREAMS = 32
#: Around a state of one cache: where its sequence's number says how much is before the rows, and how much behind.
_SPARE = 4 * (MOST_STREAMS - 1)

_CELL = np.dtype([("position", "<i4"), ("count", "<u4"), ("sequence", "<i4")])
_ROWS = struct.Struct("<iQ")
#: Words that a build may write after the number of layers.
_MOST_WORDS = 4
_MOST_LAYERS = 4096
#: ggml's numbers of the types that a block may have, with numpy's type of their bits.
TYPES: dict[int, tuple[str, type[np.unsignedinteger[Any]]]] = {
    0: ("float32", np.uint32),
    1: ("float16", np.uint16),
    30: ("bfloat16", np.uint16),
}


class _CacheLayout(NamedTuple):
    """What is the same in every state of one KV cache: type, [words], bytes of a row of K and of V of each layer."""

    type: int
    words: bytes
    k: tuple[int, ...]
    v: tuple[int, ...]

    def nbytes(self, cells: int, streams: int) -> int:
        return (
            12
            + 4 * streams
            + cells * _CELL.itemsize
            + len(self.words)
            + sum(_ROWS.size + cells * row for row in self.k + self.v)
        )


class StateLayout:
    """The layout of one model's states in one build."""

    def __init__(self, caches: tuple[_CacheLayout, ...], magic: bytes, window: int = 0, first: int = 0) -> None:
        """``window``: positions of the sliding windows, 0 without; ``first``: the layer with which the caches begin."""
        self.caches, self.magic, self.window, self.first = caches, magic, window, first

    @classmethod
    def learn(cls, data: npt.NDArray[np.uint8], cells: int, window: int = 0) -> StateLayout:
        """Read the layout off a state of ``cells`` tokens from position 0; raises FormatError if it is not understood.

        Every byte that is no row must be one that `LlamaState` writes.
        """
        raw = data.tobytes()
        reasons = []
        for words in range(_MOST_WORDS + 1):
            try:
                caches = tuple(_read_caches(raw, cells, window, 4 * words))
                if len(caches) != (2 if window else 1):
                    raise ValueError(f"{len(caches)} caches and a window of {window}")
                layout = cls(caches, raw[:4], window)
            except (ValueError, struct.error) as error:
                reasons.append(str(error))
                continue
            if np.array_equal(LlamaState(layout, cells, data).copy(cells).data, data):
                return layout
            reasons.append("its cells are described in another way")
        raise FormatError(f"llama.cpp's state is not understood: {reasons[0]}")

    @cached_property
    def windows(self) -> StateLayout:
        """The layout of the sliding windows alone."""
        return StateLayout(self.caches[1:], self.magic, self.window, len(self.caches[0].k))

    def count(self, number: int, cells: int) -> int:
        """Tokens that cache ``number`` has in a state of ``cells``: the windows only the last ones."""
        return min(cells, self.window) if number or self.first else cells

    @property
    def dtype(self) -> str:
        """The type of K and V, by the name that model spaces use."""
        return TYPES[self.caches[0].type][0]

    @property
    def bits(self) -> type[np.unsignedinteger[Any]]:
        """numpy's type of the bits of one number."""
        return TYPES[self.caches[0].type][1]

    def nbytes(self, cells: int, streams: int = 1) -> int:
        """Bytes of a state of so many tokens in a context of so many streams."""
        return 8 + sum(cache.nbytes(self.count(i, cells), streams) for i, cache in enumerate(self.caches))

    @property
    def fixed_places(self) -> bool:
        """True if rows have the same distances from each other in all sequences' states."""
        return len(self.caches) == 1

    def room(self, cells: int, slot: int, streams: int) -> npt.NDArray[np.uint8]:
        """Memory for a state of so many tokens, which `LlamaState.as_sequence` can make another sequence's."""
        start, size = _SPARE - 4 * slot, self.nbytes(cells, streams)
        return np.empty(self.nbytes(cells, MOST_STREAMS) + _SPARE, np.uint8)[start : start + size]


def _read_caches(raw: bytes, cells: int, window: int, words: int) -> Iterator[_CacheLayout]:
    """The layouts of the caches in a state; raises ValueError or struct.error where it is not one."""
    at, total = 8, cells
    while at < len(raw):
        streams, count = struct.unpack_from("<II", raw, at)
        at += 8 + cells * _CELL.itemsize
        transposed, layers = struct.unpack_from("<II", raw, at)
        if (streams, count, transposed) != (1, cells, 0) or not 0 < layers <= _MOST_LAYERS:
            raise ValueError(f"{streams} streams, {count} cells of {cells}, V as {transposed}, {layers} layers")
        at += 8 + words
        between, kinds, rows = raw[at - words : at], set[int](), list[int]()
        for _ in range(2 * layers):
            kind, row = _ROWS.unpack_from(raw, at)
            at += _ROWS.size + cells * row
            if kind not in TYPES or at > len(raw):
                raise ValueError(f"rows of type {kind} and {row} bytes")
            kinds.add(kind)
            rows.append(row)
        if len(kinds) > 1:
            raise ValueError(f"rows of types {sorted(kinds)}")
        yield _CacheLayout(kinds.pop(), between, tuple(rows[:layers]), tuple(rows[layers:]))
        cells = min(total, window)


class LlamaState:
    """One state of ``cells`` positions from 0 on: rows in place, and around them what the library wants.

    Layers are counted through the caches; those with windows come last, and have the rows of the last positions.
    ``slot``: the sequence, which is the number of its stream as well, of ``streams``. ``data``: a state that the
    library wrote; None: a new one whose rows are to be filled. Raises FormatError if ``data`` has other positions.
    ``heads``: what is around the rows is written into ``data`` as well.
    """

    def __init__(
        self,
        layout: StateLayout,
        cells: int,
        data: npt.NDArray[np.uint8] | None = None,
        *,
        slot: int = 0,
        streams: int = 1,
        heads: bool = False,
    ) -> None:
        self._layout, self._bits, self.cells = layout, layout.bits, cells
        size = layout.nbytes(cells, streams)
        new = heads or data is None
        self.data = layout.room(cells, slot, streams) if data is None else data
        if self.data.nbytes != size:
            raise FormatError(f"llama.cpp's state of {cells} tokens has {self.data.nbytes} bytes, not {size}")
        #: Where the rows of (layer, role) begin, and the bytes of one.
        self.places: dict[tuple[int, str], tuple[int, int]] = {}
        self._counts: list[int] = []
        #: Of a state that the library wrote: the order of each layer's rows where they are not by position.
        self._orders: list[npt.NDArray[np.intp] | None] = []
        at, first = self._write(0, layout.magic + struct.pack("<i", slot), new), layout.first
        for number, cache in enumerate(layout.caches):
            count, order = layout.count(number, cells), None
            at = self._write(at, struct.pack("<I", streams) + bytes(4 * slot) + struct.pack("<I", count), new)
            entries = np.zeros(count, _CELL)
            entries["position"], entries["count"], entries["sequence"] = range(cells - count, cells), 1, slot
            if not new:
                order = _order(self.data[at : at + entries.nbytes].view(_CELL)["position"], cells)
            at = self._write(at, entries.tobytes(), new)
            at = self._write(at, struct.pack("<II", 0, len(cache.k)) + cache.words, new)
            for role, rows in (("k", cache.k), ("v", cache.v)):
                for layer, row in enumerate(rows, first):
                    at = self._write(at, _ROWS.pack(cache.type, row), new)
                    self.places[layer, role] = (at, row)
                    at += count * row
            at = self._write(at, bytes(4 * (streams - 1 - slot)), new)
            first += len(cache.k)
            self._counts += [count] * len(cache.k)
            self._orders += [order] * len(cache.k)

    def copy(self, cells: int, *, slot: int = 0, streams: int = 1) -> LlamaState:
        """A new state of the first ``cells`` positions, rows by position.

        Those beyond this one's are to be filled, and the windows if they end elsewhere.
        """
        made = LlamaState(self._layout, cells, slot=slot, streams=streams)
        common = min(cells, self.cells)
        for layer, role in self.places:
            if cells == self.cells:
                made.rows(layer, role)[:] = self.by_position(layer, role)
            elif layer < len(self._layout.caches[0].k):
                made.rows(layer, role)[:common] = self.by_position(layer, role)[:common]
        return made

    def as_sequence(self, slot: int, streams: int) -> LlamaState:
        """The same as a state of another sequence. This one's rows may still be read, but it is no state any more.

        Nothing is copied where there is one cache: the rows stay where they are.
        """
        room = self.data.base
        sorted_rows = all(order is None for order in self._orders)
        if not self._layout.fixed_places or not sorted_rows or room is None:
            return self.copy(self.cells, slot=slot, streams=streams)
        start = _SPARE - 4 * slot
        data = room[start : start + self._layout.nbytes(self.cells, streams)]
        return LlamaState(self._layout, self.cells, data, slot=slot, streams=streams, heads=True)

    def windows(self) -> LlamaState:
        """A copy of the sliding windows, as they are loaded back: without the position that nothing sees any more."""
        made = LlamaState(self._layout if self._layout.first else self._layout.windows, self.cells)
        for at in made.places:
            made.rows(*at)[:] = self.by_position(*at)
            if self.cells >= self._layout.window:
                made.rows(*at)[0] = 0
        return made

    def fill_windows(self, windows: LlamaState) -> None:
        """Fill the rows of the sliding windows; they end at the same position."""
        for at in windows.places:
            self.rows(*at)[:] = windows.rows(*at)

    def _write(self, at: int, head: bytes, new: bool) -> int:
        if new:
            self.data[at : at + len(head)] = np.frombuffer(head, np.uint8)
        return at + len(head)

    def rows(self, layer: int, role: str) -> npt.NDArray[np.unsignedinteger[Any]]:
        """K or V of a layer as bits [tokens, heads * dim], in place."""
        at, row = self.places[layer, role]
        count = self._counts[layer - self._layout.first]
        return self.data[at : at + count * row].view(self._bits).reshape(count, -1)

    def by_position(self, layer: int, role: str) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The same in ascending positions; a copy where they are not."""
        rows, order = self.rows(layer, role), self._orders[layer - self._layout.first]
        return rows if order is None else rows[order]


def _order(positions: npt.NDArray[np.int32], cells: int) -> npt.NDArray[np.intp] | None:
    """How to sort rows at the last positions of ``cells``; None: they are. Raises FormatError for other positions."""
    expected = np.arange(cells - len(positions), cells)
    if np.array_equal(positions, expected):
        return None
    order = np.argsort(positions)
    if not np.array_equal(positions[order], expected):
        raise FormatError(f"llama.cpp's state of {cells} tokens has other positions")
    return order
