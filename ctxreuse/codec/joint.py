"""Planes of joint levels between their decoding, all at once, and their use, one by one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy.typing as npt

from ctxreuse.codec.profile import Place

__all__ = ["JointPlanes"]

Bits = npt.NDArray[Any]

#: Bytes of decoded planes that are kept for who has not asked for all of a run of blocks yet. Engines load layer after
#: layer, so that is little: what ten layers keep of the contexts that are loading.
_KEPT = 128 << 20


class _Run:
    """Planes of a run of blocks: ``left`` were not asked for yet."""

    def __init__(self, places: tuple[Place, ...]) -> None:
        self.lock, self.left = threading.Lock(), set(places)
        self.rows: Bits | None = None
        self.nbytes = 0


class JointPlanes:
    """Decoded joint planes until each of them was taken. Any thread may call.

    Args:
        kept: Most bytes to keep; the last run stays in any case.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._runs: OrderedDict[Hashable, _Run] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of decoded planes that wait."""
        with self._lock:
            return sum(run.nbytes for run in self._runs.values())

    def take(self, name: Hashable, places: tuple[Place, ...], place: Place, decode: Callable[[], Bits]) -> Bits:
        """Return the plane at ``place``; ``decode`` gives all of them, [planes, heads, tokens, dim], at the first call.

        ``name``: equal for equal runs of blocks. What ``decode`` raises is passed on, and nothing is kept.
        """
        with self._lock:
            run = self._runs.setdefault(name, _Run(places))
            self._runs.move_to_end(name)
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

    def _shrink(self, done: Hashable | None) -> None:
        """Drop a run that was taken, and the oldest while there are too many bytes."""
        with self._lock:
            if done is not None:
                self._runs.pop(done, None)
            total = sum(run.nbytes for run in self._runs.values())
            while total > self._kept and len(self._runs) > 1:
                total -= self._runs.popitem(last=False)[1].nbytes
