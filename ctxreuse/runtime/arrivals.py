"""Blocks that came encoded and were loaded into a context: what goes to the store is what came."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView, rekey
from ctxreuse.levels import is_raw

if TYPE_CHECKING:
    from ctxreuse.engines.base import Engine, Live

__all__ = ["Arrivals", "sealed"]


class Arrivals:
    """By context, until it is released the first time: no context is cut back before. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: WeakKeyDictionary[Live, dict[int, BlockView]] = WeakKeyDictionary()

    def note(self, live: Live, views: Sequence[BlockView]) -> None:
        """These were loaded into ``live``."""
        coded = {v.header.end // len(v.tokens) - 1: v for v in views if not is_raw(v.header.level)}
        if coded:
            with self._lock:
                self._held[live] = coded

    def take(self, live: Live) -> Mapping[int, BlockView]:
        """The encoded blocks of ``live`` by their number in the context; they are forgotten here."""
        with self._lock:
            return self._held.pop(live, {})


def sealed(
    engine: Engine, live: Live, keys: Sequence[bytes], parent: bytes, first: int, arrived: Mapping[int, BlockView]
) -> Iterator[tuple[bytes, npt.NDArray[np.uint8]]]:
    """``keys`` with the bytes of blocks ``first``, ``first + 1``, … of a context: as they arrived, else exported."""
    parents = [parent, *keys]
    for came, run in groupby(range(len(keys)), key=lambda i: first + i in arrived):
        numbers = list(run)
        start, mine = numbers[0], [keys[i] for i in numbers]
        if came:
            for i in numbers:
                yield keys[i], rekey(arrived[first + i].buffer, keys[i], parents[i])
        else:
            yield from zip(mine, engine.export(live, mine, parents[start], first + start))
