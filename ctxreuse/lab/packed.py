"""A trace in memory: a few numbers a request and a block, however long the prompts are.

An id names a whole prefix, so the last block of a path gives the path: blocks are a forest, and only each block's
parent is kept. Blocks are numbered in the order of their coming, so a prompt's new ones are a run of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import FormatError
from ctxreuse.lab.trace import Request, Trace

__all__ = ["IdTable", "Ints", "Packed", "pack"]

Ints = npt.NDArray[np.int64]
Small = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

_COLUMNS: dict[str, Callable[[Request], float]] = {
    "t": lambda request: request.t,
    "tokens": lambda request: request.tokens,
    "session": lambda request: request.session,
    "mark": lambda request: request.kind.label,
    "busy": lambda request: request.busy,
}

#: Blocks and requests packed by one round of array work.
_ROUND_BLOCKS = 1 << 19
_ROUND_REQUESTS = 1 << 13


class Packed:
    """All requests of a trace, by number; about 60 bytes a request and 12 a block. Frozen once made.

    ``t`` seconds, ``tokens``, ``session``, ``busy`` as in `Request`; ``mark``: the label that policies get when
    the turn has been answered; ``length``: blocks of the path; ``tip``: the last of them, -1 for an empty path;
    ``known``: how many leading blocks came in an earlier request. ``parent`` of each block, -1 for a first one.
    """

    def __init__(
        self,
        name: str,
        block_tokens: int,
        columns: Mapping[str, npt.NDArray[Any]],
        known: Small,
        length: Small,
        tip: Small,
        parent: Small,
    ) -> None:
        self.name, self.block_tokens = name, block_tokens
        self.t: Floats = columns["t"]
        self.tokens: Ints = columns["tokens"].astype(np.int64, copy=False)
        self.session: Ints = columns["session"].astype(np.int64, copy=False)
        self.mark: Small = columns["mark"].astype(np.int32, copy=False)
        self.busy: Floats = columns["busy"]
        self.known, self.length, self.tip, self.parent = known, length, tip, parent
        number = np.arange(len(parent), dtype=np.int32)
        # Where a run of consecutive numbers along one path begins.
        self._first: Small = np.maximum.accumulate(np.where(parent == number - 1, 0, number)) if len(parent) else number
        self._first_view, self._parent_view = self._first.data, self.parent.data

    def __len__(self) -> int:
        return len(self.t)

    @property
    def blocks(self) -> int:
        """Different blocks."""
        return len(self.parent)

    def runs(self, request: int) -> list[range]:
        """Return the path of a request as runs of block numbers, root first."""
        first, parent = self._first_view, self._parent_view
        found, tip = [], int(self.tip[request])
        while tip >= 0:
            start = first[tip]
            found.append(range(start, tip + 1))
            tip = parent[start]
        found.reverse()
        return found

    def path(self, request: int) -> list[int]:
        """Return the path of a request, root first."""
        found: list[int] = []
        for run in self.runs(request):
            found.extend(run)
        return found

    def array(self, request: int) -> Ints:
        """Return the path of a request, root first, as int64 [blocks]."""
        runs = [np.arange(run.start, run.stop) for run in self.runs(request)]
        return runs[0] if len(runs) == 1 else np.concatenate(runs) if runs else np.zeros(0, np.int64)

    def save(self, folder: Path) -> None:
        """Write the columns into a folder, for `load` in another process."""
        np.save(folder / "name.npy", np.array([self.name]))
        np.save(folder / "block_tokens.npy", np.array(self.block_tokens))
        for name in (*_COLUMNS, "known", "length", "tip", "parent"):
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> Packed:
        """Map what `save` wrote: processes on one machine share the memory."""
        columns = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _COLUMNS}
        rest = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("known", "length", "tip", "parent")]
        name = str(np.load(folder / "name.npy")[0])
        return cls(name, int(np.load(folder / "block_tokens.npy")), columns, *rest)

    def hit_tokens(self, hits: npt.NDArray[np.integer]) -> Ints:
        """Return the tokens in the first ``hits`` blocks of each request: the last block may be filled in part."""
        return np.minimum(hits.astype(np.int64) * self.block_tokens, self.tokens)

    def check(self) -> None:
        """Raise AssertionError where paths, parents and what was known disagree. O(all blocks of all requests)."""
        seen = 0
        for request in range(len(self)):
            path = self.path(request)
            assert len(path) == self.length[request]
            assert all(self.parent[b] == a for a, b in zip([-1, *path], path)), f"request {request} leaves its path"
            assert sum(block < seen for block in path) == self.known[request]
            assert path[self.known[request] :] == list(range(seen, seen + len(path) - int(self.known[request])))
            seen = max([seen, *(block + 1 for block in path)])
        assert seen == self.blocks


def pack(trace: Trace, progress: Callable[[int], None] = lambda done: None) -> Packed:
    """Read a whole trace. ``progress`` is called now and then with the number of requests done.

    Raises FormatError as reading does, for an empty trace, and where an id names two different prefixes.
    """
    made = _Packing(trace)
    waiting: list[Request] = []
    blocks = 0
    for request in trace:
        waiting.append(request)
        blocks += len(request.path)
        if blocks >= _ROUND_BLOCKS or len(waiting) >= _ROUND_REQUESTS:
            made.take(waiting)
            progress(made.done)
            waiting, blocks = [], 0
    if waiting:
        made.take(waiting)
    progress(made.done)
    return made.finish()


class _Packing:
    """Columns under way."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._table, self.done = trace, IdTable(), 0
        self._columns: dict[str, list[Floats]] = {name: [] for name in _COLUMNS}
        self._known: list[Small] = []
        self._length: list[Small] = []
        self._tip: list[Small] = []
        self._parent = np.zeros(1 << 12, np.int32)

    def take(self, requests: Sequence[Request]) -> None:
        for name, parts in self._columns.items():
            read = _COLUMNS[name]
            parts.append(np.array([read(request) for request in requests], np.float64))
        length = np.array([len(request.path) for request in requests], np.int64)
        ids = np.concatenate([request.path for request in requests]) if len(requests) else np.zeros(0, np.int64)
        before = len(self._table)
        numbers = self._number(ids)
        ends = np.cumsum(length)
        ahead = np.empty_like(numbers)
        ahead[1:] = numbers[:-1]
        ahead[(ends - length)[length > 0]] = -1
        self._link(numbers, ahead, before)
        wrong = np.flatnonzero(self._parent[numbers] != ahead)
        if len(wrong):
            request = self.done + int(np.searchsorted(ends, wrong[0], side="right"))
            raise FormatError(
                f"block id {ids[wrong[0]]} names two different prefixes",
                where=f"{self._trace.name}, request {request + 1}",
                fix="Ids must be of whole prefixes: hash each block together with what comes before it",
            )
        # What came first in a later request of this round is new to it, what came earlier in the round is not.
        fresh = np.zeros(len(numbers), bool)
        _, firsts = np.unique(numbers, return_index=True)
        fresh[firsts] = numbers[firsts] >= before
        counts = np.concatenate([[0], np.cumsum(fresh)])
        new = counts[ends] - counts[ends - length]
        tips = np.full(len(requests), -1, np.int32)
        tips[length > 0] = numbers[ends[length > 0] - 1]
        self._known.append((length - new).astype(np.int32))
        self._length.append(length.astype(np.int32))
        self._tip.append(tips)
        self.done += len(requests)

    def _number(self, ids: Ints) -> Ints:
        """Numbers of ids, new ones in the order of their first place."""
        unique, firsts, inverse = np.unique(ids, return_index=True, return_inverse=True)
        found = self._table.find(unique)
        new = np.flatnonzero(found < 0)
        new = new[np.argsort(firsts[new])]
        found[new] = np.arange(len(self._table), len(self._table) + len(new))
        self._table.add(unique[new])
        return found[inverse]

    def _link(self, numbers: Ints, ahead: Ints, before: int) -> None:
        count = len(self._table)
        if count > len(self._parent):
            self._parent = np.concatenate([self._parent, np.zeros(max(count, len(self._parent)), np.int32)])
        # Backwards, so that of several places the first is what stays.
        new = np.flatnonzero(numbers >= before)[::-1]
        self._parent[numbers[new]] = ahead[new]

    def finish(self) -> Packed:
        if not self.done:
            raise FormatError("the trace is empty", where=self._trace.name, fix="Record some traffic first")
        return Packed(
            self._trace.name,
            self._trace.block_tokens,
            {name: np.concatenate(parts) for name, parts in self._columns.items()},
            np.concatenate(self._known),
            np.concatenate(self._length),
            np.concatenate(self._tip),
            self._parent[: len(self._table)].copy(),
        )


_EMPTY = -1
_FIRST = 1 << 12
#: Knuth's multiplicative hashing: 2^64 divided by the golden ratio, odd.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_Ids = npt.NDArray[np.int64]


class IdTable:
    """Ids ≥ 0 (int64) to numbers 0, 1, 2, … in the order of their coming. A dict takes five times the memory."""

    def __init__(self) -> None:
        self._keys = np.full(_FIRST, _EMPTY, np.int64)
        self._values = np.zeros(_FIRST, np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, ids: _Ids) -> _Ids:
        """Return the number of each id; -1 where it has none."""
        found = np.full(len(ids), -1, np.int64)
        slots, left = self._slots(ids), np.arange(len(ids))
        while len(left):
            at = slots[left]
            keys = self._keys[at]
            same = keys == ids[left]
            found[left[same]] = self._values[at[same]]
            left = left[~same & (keys != _EMPTY)]
            slots[left] = (slots[left] + 1) & (len(self._keys) - 1)
        return found

    def add(self, ids: _Ids) -> None:
        """Number new ids, all different and none of them known, in their order."""
        if not len(ids):
            return
        while (self._count + len(ids)) * 2 > len(self._keys):
            self._grow()
        self._place(ids, np.arange(self._count, self._count + len(ids), dtype=np.int32))
        self._count += len(ids)

    def _place(self, ids: _Ids, values: npt.NDArray[np.int32]) -> None:
        slots, left = self._slots(ids), np.arange(len(ids))
        while len(left):
            free = left[self._keys[slots[left]] == _EMPTY]
            # Of several that want one slot the last written has it; the others see another's key there.
            self._keys[slots[free]] = ids[free]
            won = free[self._keys[slots[free]] == ids[free]]
            self._values[slots[won]] = values[won]
            left = np.setdiff1d(left, won, assume_unique=True)
            slots[left] = (slots[left] + 1) & (len(self._keys) - 1)

    def _slots(self, ids: _Ids) -> _Ids:
        shift = np.uint64(64 - (len(self._keys) - 1).bit_length())
        return ((ids.astype(np.uint64) * _GOLDEN) >> shift).astype(np.int64)

    def _grow(self) -> None:
        used = self._keys != _EMPTY
        keys, values = self._keys[used], self._values[used]
        self._keys = np.full(2 * len(self._keys), _EMPTY, np.int64)
        self._values = np.zeros(len(self._keys), np.int32)
        self._place(keys, values)

    def check(self) -> None:
        """Raise AssertionError unless every number occurs once and is found."""
        used = self._keys != _EMPTY
        assert int(used.sum()) == self._count, "ids are counted wrongly"
        assert np.array_equal(np.sort(self._values[used]), np.arange(self._count)), "a number is missing"
        assert np.array_equal(self.find(self._keys[used]), self._values[used]), "an id is not found"
