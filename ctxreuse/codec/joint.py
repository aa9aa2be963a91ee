"""Planes of joint levels between their decoding, all at once, and their use, one by one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy.typing as npt

from ctxreuse.block.format import BlockView
from ctxreuse.codec.profile import Place

__all__ = ["JointPlanes"]

Bits = npt.NDArray[Any]

#: Bytes of decoded planes that may wait: ten layers of all contexts that are loading.
_KEPT = 1 << 30


class _Run:
    """Planes of a run of blocks: ``left`` were not asked for yet; ``alive``: whose blocks they are."""

    def __init__(self, places: tuple[Place, ...], alive: weakref.ref[BlockView]) -> None:
        self.lock, self.left, self.alive = threading.Lock(), set(places), alive
        self.rows: Bits | None = None
        self.nbytes = 0


class JointPlanes:
    """Decoded joint planes until each of them was taken, or no load has the blocks any more. Any thread may call.

    Engines load layer after layer, and a load may end in the middle.

    Args:
        kept: Most bytes to keep; the last run stays in any case.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        #: The last used last. Entries may go at any moment, see `_removed`, so it is never iterated over itself.
        self._runs: dict[Hashable, _Run] = {}

    def take(
        self, name: Hashable, block: BlockView, places: tuple[Place, ...], place: Place, decode: Callable[[], Bits]
    ) -> Bits:
        """Return the plane at ``place``; ``decode`` gives all of them, [planes, heads, tokens, dim], at the first call.

        ``name``: equal for equal runs of blocks, of which ``block`` is one. What ``decode`` raises is passed on, and
        nothing is kept.
        """
        with self._lock:
            run = self._runs.pop(name, None) or _Run(places, weakref.ref(block, partial(self._removed, name)))
            self._runs[name] = run
        done = True
        try:
            with run.lock:
                if run.rows is None:
                    run.rows = decode()
                    run.nbytes = run.rows.nbytes
                run.left.discard(place)
                done = not run.left
                rows: Bits = run.rows[places.index(place)]
        finally:
            self._shrink(name if done else None)
        return rows

    def _removed(self, name: Hashable, alive: weakref.ref[BlockView]) -> None:
        """Drop a run whose blocks no load has; called wherever the last one lets go, in any thread."""
        run = self._runs.get(name)  # without the lock, which this thread may hold
        if run is not None and run.alive is alive:
            self._runs.pop(name, None)

    def _shrink(self, done: Hashable | None) -> None:
        """Drop a run that was taken, and the oldest while there are too many bytes."""
        with self._lock:
            if done is not None:
                self._runs.pop(done, None)
            runs = list(self._runs.items())
            total = sum(run.nbytes for _, run in runs)
            for name, run in runs[:-1]:
                if total <= self._kept:
                    break
                self._runs.pop(name, None)
                total -= run.nbytes
