"""A vector for each turn, beside the words: int8 codes in a mapped file, their places in the index, and a search.

Up to 100,000 vectors are all compared with a query's: 256 numbers of each are 26 MB, which one thread reads in 2 ms. Of
more, those whose numbers have most signs in common with the query's are compared: their signs are 32 bytes each, and of
300,000 sentences they lead to all of the nearest ten and 99.97 % of the nearest hundred, in 3 ms in place of 10. A
graph of neighbours would be faster, but would have to be kept, repaired after crashes, and cleaned of what is deleted.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxreuse.kernels.linear import Weights, linear, quantise_weights

__all__ = ["VECTORS", "VectorTable"]

#: Name of the file, beside the index.
VECTORS = "vectors.int8"
#: Vectors by which the file grows, at least.
_GROWTH = 1024
#: Vectors that are all compared; of more, so many are, or so many times as many as are wanted. With fewer numbers than
#: these a vector has too few signs.
_EXACT, _COMPARED, _TIMES, _LEAST_SIGNS = 100_000, 4096, 8, 128
#: Vectors whose signs are taken at a time.
_AT_ONCE = 1 << 16


class VectorTable:
    """The vectors in one file, or in memory; for one thread at a time. Methods raise sqlite3.Error and OSError.

    Which turn has which place, and the scale of its codes, are in the index, written after the codes are on the disk:
    what it names is there after a crash. A place that is given up is overwritten at once.
    """

    def __init__(self, db: sqlite3.Connection, folder: Path | None) -> None:
        self._db, self._folder = db, folder
        self._codes: NDArray[np.int8] = np.empty((0, 0), np.int8)
        self._scales = np.empty(0, np.float32)
        #: The turn at each place; 0: none, and its scale is 0.
        self._turns = np.empty(0, np.int64)
        self._free: list[int] = []
        #: The signs of the numbers at each place, uint64 [numbers / 64, places]; without places: all are compared.
        self._signs = np.empty((0, 0), np.uint64)
        self._name, self._width = self._stored()
        self._load()

    def _stored(self) -> tuple[str, int]:
        found = self._db.execute("SELECT name, dimensions FROM embedder").fetchone()
        return (str(found[0]), int(found[1])) if found else ("", 0)

    def _load(self) -> None:
        rows = self._db.execute("SELECT turn, place, scale FROM vectors").fetchall()
        table = np.array(rows, np.float64).reshape(-1, 3)
        turns, places = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
        most = int(places.max(initial=-1)) + 1
        self._map(most, create=not most)
        size = len(self._codes)
        self._turns, self._scales = np.zeros(size, np.int64), np.zeros(size, np.float32)
        self._turns[places], self._scales[places] = turns, table[:, 2]
        self._free = np.flatnonzero(self._turns == 0)[::-1].tolist()
        self._sign()

    def _sign(self) -> None:
        """Take the signs of all vectors, if not all are to be compared."""
        size = len(self._turns)
        if size <= _EXACT or self._width < _LEAST_SIGNS:
            self._signs = np.empty((0, 0), np.uint64)
            return
        parts = [_signs_of(self._codes[at : at + _AT_ONCE]) for at in range(0, size, _AT_ONCE)]
        self._signs = np.ascontiguousarray(np.concatenate(parts)[:size].T)

    def _map(self, most: int, *, create: bool) -> None:
        """Open the file with so many vectors or more. Raises sqlite3.DatabaseError if it has fewer and must not."""
        if self._folder is None or not self._width:
            grown = np.zeros((most, self._width), np.int8)
            grown[: len(self._codes)] = self._codes[:most] if self._codes.size else 0
            self._codes = grown
            return
        file = os.open(self._folder / VECTORS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_size < most * self._width:
                if not create:
                    raise sqlite3.DatabaseError("the file of vectors is shorter than the index says")
                os.ftruncate(file, most * self._width)
            rows = os.fstat(file).st_size // self._width
            with os.fdopen(os.dup(file), "r+b") as opened:
                self._codes = (
                    np.memmap(opened, np.int8, "r+", shape=(rows, self._width))
                    if rows
                    else np.empty((0, self._width), np.int8)
                )
        finally:
            os.close(file)

    def __len__(self) -> int:
        return len(self._turns) - len(self._free)

    @property
    def of(self) -> tuple[str, int]:
        """The name of the embedder that they are of, and their numbers; ``""`` and 0: there are none."""
        return self._name, self._width

    def clear(self, name: str, width: int) -> None:
        """Delete all, and have those of this embedder. Inside of a transaction."""
        self._codes[:] = 0
        self._db.execute("DELETE FROM vectors")
        self._db.execute("DELETE FROM embedder")
        self._db.execute("INSERT INTO embedder VALUES (?, ?)", (name, width))
        self._name, self._width = name, width
        self._codes = np.empty((0, width), np.int8)
        self._load()

    def add(self, turns: Sequence[int], vectors: NDArray[np.float32]) -> None:
        """Add the vectors of turns that have none, float32 [turns, dimensions]. Inside of a transaction."""
        if len(self._free) < len(turns):
            self._grow(len(turns) - len(self._free))
        places = [self._free.pop() for _ in turns]
        coded = quantise_weights(vectors)
        assert coded.scales is not None
        self._codes[places], self._scales[places], self._turns[places] = coded.data, coded.scales, turns
        if self._signs.size:
            self._signs[:, places] = _signs_of(coded.data).T
        if isinstance(self._codes, np.memmap):
            self._codes.flush()
        rows = zip(turns, places, coded.scales.tolist())
        self._db.executemany("INSERT INTO vectors VALUES (?, ?, ?)", rows)

    def _grow(self, count: int) -> None:
        before = len(self._turns)
        size = before + max(count, _GROWTH, before // 2)
        self._map(size, create=True)
        self._turns = np.concatenate([self._turns, np.zeros(size - before, np.int64)])
        self._scales = np.concatenate([self._scales, np.zeros(size - before, np.float32)])
        self._free[:0] = range(size - 1, before - 1, -1)
        self._sign()

    def remove(self, turns: Sequence[int]) -> None:
        """Remove the vectors of turns, if they have any. Inside of a transaction."""
        for turn in turns:
            for (place,) in self._db.execute("DELETE FROM vectors WHERE turn = ? RETURNING place", (turn,)).fetchall():
                self._codes[place], self._scales[place], self._turns[place] = 0, 0, 0
                self._free.append(place)

    def undo(self) -> None:
        """Read all places again, after a transaction that failed."""
        self._name, self._width = self._stored()
        self._load()

    def nearest(
        self, vector: NDArray[np.float32], count: int, conditions: tuple[str, Sequence[Any]]
    ) -> list[tuple[int, float]]:
        """Return the turns nearest to a vector with their cosines, the nearest first.

        ``conditions``: of SQL on the table ``turns``, as of `Filters.sql`.
        """
        filtered = conditions[0] != "1"
        most = 8 * count + 64 if filtered else count
        alike = self._alike(vector, max(_COMPARED, _TIMES * most))
        places = alike[_highest(self._cosines(vector, alike), most)]
        if filtered and len(self):
            kept = self._allowed(places, conditions)
            if len(kept) < count and len(places) < len(self):
                kept = self._allowed(None, conditions)
                kept = kept[_highest(self._cosines(vector, kept), count)]
            places = kept[:count]
        found = zip(self._turns[places], self._cosines(vector, places))
        return [(int(turn), float(cosine)) for turn, cosine in found if turn]

    def _alike(self, vector: NDArray[np.float32], most: int) -> NDArray[np.int64]:
        """Return places, so many or more, whose numbers have most signs in common with a vector's; or all."""
        size = len(self._turns)
        if not self._signs.size or most >= size:
            return np.arange(size)
        other = np.zeros(size, np.uint16)
        for signs, own in zip(self._signs, _signs_of(vector[None])[0]):
            other += np.bitwise_count(signs ^ own)
        enough = int(np.searchsorted(np.cumsum(np.bincount(other)), most))
        return np.flatnonzero(other <= enough)

    def _cosines(self, vector: NDArray[np.float32], places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the cosines of the vectors at some places."""
        cosines = np.zeros((1, len(places)), np.float32)
        if len(places):
            every = len(places) == len(self._turns)
            codes, scales = (self._codes, self._scales) if every else (self._codes[places], self._scales[places])
            linear(np.ascontiguousarray(vector[None]), Weights(codes, scales), cosines)
            if every:
                cosines = cosines[:, places]
        found: NDArray[np.float32] = cosines[0]
        return found

    def _allowed(self, places: NDArray[np.int64] | None, conditions: tuple[str, Sequence[Any]]) -> NDArray[np.int64]:
        """Return those places, or of all, whose turns meet the conditions, in the same order."""
        where, values = conditions
        if places is None:
            text = f"SELECT place FROM vectors JOIN turns ON turns.id = vectors.turn WHERE {where}"
            return np.array([place for (place,) in self._db.execute(text, values)], np.int64)
        ids = ",".join(str(int(turn)) for turn in self._turns[places])
        found = {id for (id,) in self._db.execute(f"SELECT id FROM turns WHERE id IN ({ids}) AND {where}", values)}
        return places[[int(turn) in found for turn in self._turns[places]]]

    def cosines_of(self, vector: NDArray[np.float32], turns: Sequence[int]) -> dict[int, float]:
        """Return the cosines of those turns that have a vector."""
        ids = ",".join(str(int(turn)) for turn in turns)
        rows = self._db.execute(f"SELECT turn, place FROM vectors WHERE turn IN ({ids})").fetchall()
        cosines = self._cosines(vector, np.array([place for _, place in rows], np.int64))
        return {int(turn): float(cosine) for (turn, _), cosine in zip(rows, cosines)}


def _signs_of(numbers: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a bit for each number that is below 0, uint64 [rows, numbers / 64]."""
    bits = np.packbits(numbers < 0, axis=1)
    whole = np.zeros((len(bits), -(-bits.shape[1] // 8) * 8), np.uint8)
    whole[:, : bits.shape[1]] = bits
    signs: NDArray[np.uint64] = whole.view(np.uint64)
    return signs


def _highest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return where the highest values are, the highest first."""
    if count < len(values):
        most = np.argpartition(values, len(values) - count)[len(values) - count :]
    else:
        most = np.arange(len(values))
    return most[np.argsort(-values[most], kind="stable")]
