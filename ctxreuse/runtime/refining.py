"""Refinements that arrive after their blocks were used: merged, and kept for whoever uses the context next."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView, rekey
from ctxreuse.errors import CtxReuseError

if TYPE_CHECKING:
    from ctxreuse.codec import Codec
    from ctxreuse.runtime.remote import Fetch

__all__ = ["Refining"]

log = logging.getLogger(__name__)

#: Seconds that refinements may take to come after their context was released, and between two looks at them.
_LONGEST, _LOOK = 30.0, 0.05
#: Fetches that may wait for their turn; the context of another one stays as coarse as it came.
_WAITING = 4


class _Late(NamedTuple):
    fetch: Fetch
    blocks: Sequence[tuple[bytes, bytes, BlockView]]
    put: Callable[[bytes, npt.NDArray[np.uint8]], bool]


class Refining:
    """A thread that begins with the first fetch. Any thread may call."""

    def __init__(self) -> None:
        self._late: queue.Queue[_Late | None] = queue.Queue(_WAITING)
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        #: Blocks that became finer.
        self.merged = 0

    def add(
        self,
        codec: Codec,
        fetch: Fetch,
        blocks: Sequence[tuple[bytes, bytes, BlockView]],
        put: Callable[[bytes, npt.NDArray[np.uint8]], bool],
    ) -> None:
        """``fetch`` brings refinements of ``blocks`` (key and parent to keep them under, and the block as it came), the
        last of which is the fetch's last. ``put(key, data)`` gets what became finer; ``fetch`` is stopped."""
        with self._lock:
            if not self._ends.is_set():
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, args=(codec,), name="ctxreuse-refining", daemon=True
                    )
                    self._thread.start()
                try:
                    self._late.put_nowait(_Late(fetch, blocks, put))
                    return
                except queue.Full:
                    pass
        fetch.stop()

    def close(self) -> None:
        """Stop what has not arrived, and the thread. Idempotent."""
        with self._lock:
            self._ends.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            self._late.put(None)
            thread.join()

    def _run(self, codec: Codec) -> None:
        while (late := self._late.get()) is not None:
            left = _LONGEST
            while late.fetch.ended is None and left > 0 and not self._ends.wait(_LOOK):
                left -= _LOOK
            late.fetch.stop()
            if self._ends.is_set():
                continue
            try:
                self._merge(codec, late)
            except CtxReuseError as error:
                log.warning("refinements could not be merged: %s", error)

    def _merge(self, codec: Codec, late: _Late) -> None:
        for (key, parent, view), more in zip(late.blocks, late.fetch.refinements(len(late.blocks))):
            if more is None or self._ends.is_set():
                continue
            self.merged += late.put(key, rekey(codec.merge(view, more), key, parent))
