"""Blocks that came encoded and were loaded into a context: what goes to the store is what came."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView, rekey
from ctxreuse.levels import is_raw

if TYPE_CHECKING:
    from ctxreuse.engines.base import Engine, Live
    from ctxreuse.runtime.remote import Fetch

__all__ = ["Arrivals", "Arrived", "sealed"]


class Arrived(NamedTuple):
    """Encoded blocks by their number in the context, and the fetch that may still bring refinements of the last ones:
    whoever takes it stops it."""

    blocks: Mapping[int, BlockView]
    late: Fetch | None = None


class Arrivals:
    """By context, until it is released the first time: no context is cut back before. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakKeyDictionary[Live, Arrived] = weakref.WeakKeyDictionary()
        self._stops: weakref.WeakKeyDictionary[Live, weakref.finalize[[], Live]] = weakref.WeakKeyDictionary()

    def note(self, live: Live, views: Sequence[BlockView], late: Fetch | None = None) -> None:
        """These were loaded into ``live``; ``late`` is stopped if the context dies before it is released."""
        coded = {v.header.end // len(v.tokens) - 1: v for v in views if not is_raw(v.header.level)}
        if coded:
            with self._lock:
                self._held[live] = Arrived(coded, late)
                if late is not None:
                    self._stops[live] = weakref.finalize(live, late.stop)
        elif late is not None:
            late.stop()

    def take(self, live: Live) -> Arrived:
        """What arrived for ``live``; it is forgotten here."""
        with self._lock:
            stop = self._stops.pop(live, None)
            if stop is not None:
                stop.detach()
            return self._held.pop(live, Arrived({}))


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
