"""Numbers whatever names a trace gives its blocks: an open-addressed table over numpy arrays, 24 bytes a slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["IdTable"]

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
        """The number of each id; -1 where it has none."""
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
        held = self._keys != _EMPTY
        keys, values = self._keys[held], self._values[held]
        self._keys = np.full(2 * len(self._keys), _EMPTY, np.int64)
        self._values = np.zeros(len(self._keys), np.int32)
        self._place(keys, values)

    def check(self) -> None:
        """Raises AssertionError unless every number stands once and is found again."""
        held = self._keys != _EMPTY
        assert int(held.sum()) == self._count, "ids are counted wrongly"
        assert np.array_equal(np.sort(self._values[held]), np.arange(self._count)), "a number is missing"
        assert np.array_equal(self.find(self._keys[held]), self._values[held]), "an id is not found"
