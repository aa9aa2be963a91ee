"""Stores the new blocks and states of a finished context, and indexes the locations of its chunks."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, rekey
from ctxreuse.block.levels import is_approx
from ctxreuse.engines.chunks import RelocatedContext
from ctxreuse.errors import CtxReuseError, StoreError
from ctxreuse.identity.keys import ROOT
from ctxreuse.reuse import chunks
from ctxreuse.reuse import record as index_chunks
from ctxreuse.runtime.spans import Spans, difference, intersection

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ctxreuse.block.format import BlockView
    from ctxreuse.bus.remote import Fetch
    from ctxreuse.codec import Codec
    from ctxreuse.engines.base import Context, Engine
    from ctxreuse.runtime.checkpoints import StateCheckpoints
    from ctxreuse.runtime.chunks.backfill import ChunkBackfill
    from ctxreuse.runtime.partial_blocks import PartialBlocks
    from ctxreuse.runtime.request import ContextRecord
    from ctxreuse.store.base import Store

__all__ = ["RefinementMerger", "Writeback"]

# Seconds to wait for a full queue of writes: at 0.1 GB/s the default queue of 256 MiB is empty in three.
_PATIENCE = 10.0
#: Computed tokens depend on the relocated ones before them, which are then stored once more. That is worth it for at
#: least so many computed ones in a row, and if the relocated ones are at most so many times as many.
_WORTH, _TIMES = 64, 8


log = logging.getLogger(__name__)

#: Seconds that refinements may take to come after their context was released, and between two looks at them.
_LONGEST, _LOOK = 30.0, 0.05
#: Fetches that may wait for their turn; the context of another one stays as coarse as it came.
_WAITING = 4


class _Pending(NamedTuple):
    fetch: Fetch
    blocks: Sequence[tuple[bytes, bytes, BlockView]]
    put: Callable[[bytes, npt.NDArray[np.uint8]], bool]


class RefinementMerger:
    """Merges refinements in a thread that starts with the first fetch. Any thread may call."""

    def __init__(self) -> None:
        self._pending: queue.Queue[_Pending | None] = queue.Queue(_WAITING)
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        #: Blocks that were refined.
        self.merged = 0

    def add(
        self,
        codec: Codec,
        fetch: Fetch,
        blocks: Sequence[tuple[bytes, bytes, BlockView]],
        put: Callable[[bytes, npt.NDArray[np.uint8]], bool],
    ) -> None:
        """Wait for refinements of ``blocks`` (key and parent to store them under, and the block as received).

        The last one is the fetch's last. ``put(key, data)`` gets the merged blocks; ``fetch`` is stopped.
        """
        with self._lock:
            if not self._ends.is_set():
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, args=(codec,), name="ctxreuse-refining", daemon=True
                    )
                    self._thread.start()
                try:
                    self._pending.put_nowait(_Pending(fetch, blocks, put))
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
            self._pending.put(None)
            thread.join()

    def _run(self, codec: Codec) -> None:
        while (one := self._pending.get()) is not None:
            left = _LONGEST
            while one.fetch.ended is None and left > 0 and not self._ends.wait(_LOOK):
                left -= _LOOK
            one.fetch.stop()
            if self._ends.is_set():
                continue
            try:
                self._merge(codec, one)
            except CtxReuseError as error:
                log.warning("refinements could not be merged: %s", error)

    def _merge(self, codec: Codec, one: _Pending) -> None:
        for (key, parent, view), more in zip(one.blocks, one.fetch.refinements(len(one.blocks))):
            if more is None or self._ends.is_set():
                continue
            self.merged += one.put(key, rekey(codec.merge(view, more), key, parent))


class Writeback:
    """Writes for one runtime. Any thread may call."""

    def __init__(
        self,
        engine: Engine,
        store: Store | None,
        checkpoints: StateCheckpoints,
        backfill: ChunkBackfill | None,
        partials: PartialBlocks | None,
        salt: bytes,
    ) -> None:
        self._engine, self._store, self._checkpoints, self._partials = engine, store, checkpoints, partials
        self._backfill, self._salt = backfill, salt
        self._refinements = RefinementMerger()
        self._lock = threading.Lock()
        #: `ContextRecord.given` of contexts that may be used again: their blocks may have to be stored again too.
        self._given: WeakKeyDictionary[Context, dict[int, bytes]] = WeakKeyDictionary()

    def keep(self, context: Context, record: ContextRecord, keys: Sequence[bytes]) -> list[bytes]:
        """Offer the store the missing blocks (``keys``), states and partial block of ``context``.

        It stops at the first refusal. Returns the keys of all that are worth storing.
        """
        engine, store, size = self._engine, self._store, self._engine.space.block_tokens
        keys, max_kl = keys[: -(-_offered(context) // size)], record.request.max_kl
        if store is None:
            return list(keys)
        fetch = record.take_refinements()
        if fetch is not None:
            self._refine(fetch, record, keys)
        states = self._checkpoints.states_to_store(store, context, keys, record)
        cached = store.match(keys, max_kl).blocks
        with self._lock:
            before = self._given.get(context, {}).items()
            given = {n: giver for n, giver in before if (n + 1) * size <= record.indexed} | dict(record.given)
            self._given[context] = given
        for number, (key, data) in enumerate(_sealed(engine, context, keys, cached, record.received), cached):
            put = partial(store.put, key, data, max_kl=max_kl, giver=given.get(number, b""))
            if not (put() or _put_later(store, put)):
                return list(keys)
        for position in states:
            n = position // size
            data = engine.export_state(context, keys[n - 1], keys[n - 2] if n > 1 else ROOT, position)
            self._checkpoints.learn(data.nbytes)
            store.put(keys[n - 1], data, kind="state", max_kl=max_kl, giver=given.get(n - 1, b""))
        if self._partials is not None and not _relocated(context):
            self._partials.keep(store, context, record, keys)
        return list(keys)

    def _refine(self, fetch: Fetch, record: ContextRecord, keys: Sequence[bytes]) -> None:
        """Have blocks that came coarse stored finer when their refinements are here."""
        assert self._store is not None
        blocks, max_kl = record.received, record.request.max_kl
        codec, last = self._engine.codec, max(blocks)
        run = [(keys[i], keys[i - 1] if i else ROOT, blocks[i]) for i in sorted(blocks) if i < len(keys)]
        if codec is None or last >= len(keys) or len(run) != last - min(blocks) + 1:
            fetch.stop()
            return
        self._refinements.add(
            codec, fetch, run, partial(self._store.put, max_kl=max_kl, giver=record.given.get(last, b""))
        )

    def index(self, context: Context, record: ContextRecord, keys: Sequence[bytes]) -> None:
        """Index where the chunks of a context lie whose blocks ``keys`` were put, so that other prompts find them."""
        if self._store is None:
            return
        # An approximate block that was loaded may hold rows that were relocated when it was made.
        computed = (*record.computed, (len(record.request.ids), context.n))
        loaded = difference([(run.start, run.end) for run in context.levels if is_approx(run.level)], computed)
        known = difference(((0, context.n),), (*_relocated(context), *loaded))
        request, space = record.request, self._engine.space
        cut = chunks(context.tokens, request.parts, record.indexed)
        index_chunks(self._store.chunks, self._salt, space, context.tokens, keys, cut, known)
        if self._backfill is not None:
            self._backfill.noted(keys)

    def close(self) -> None:
        """Stop waiting for refinements."""
        self._refinements.close()


def _relocated(context: Context) -> Spans:
    return context.relocated if isinstance(context, RelocatedContext) else ()


def _offered(context: Context) -> int:
    """Leading tokens of a context that are worth storing: relocated rows alone are stored elsewhere already."""
    relocated = _relocated(context)
    if not relocated:
        return context.n
    stop = 0
    for start, end in difference(((0, context.n),), relocated):
        copied = sum(b - a for a, b in intersection(relocated, ((stop, end),)))
        if end - start >= _WORTH and copied <= _TIMES * (end - stop - copied):
            stop = end
    return stop


def _sealed(
    engine: Engine, context: Context, keys: Sequence[bytes], first: int, received: Mapping[int, BlockView]
) -> Iterator[tuple[bytes, npt.NDArray[np.uint8]]]:
    """Keys and bytes of the blocks from ``first`` on: as they were received, else exported."""
    for came, run in groupby(range(first, len(keys)), key=lambda i: i in received):
        numbers = list(run)
        parent = keys[numbers[0] - 1] if numbers[0] else ROOT
        if came:
            for i in numbers:
                yield keys[i], rekey(received[i].buffer, keys[i], keys[i - 1] if i else ROOT)
        else:
            mine = [keys[i] for i in numbers]
            yield from zip(mine, engine.export(context, mine, parent, numbers[0]))


def _put_later(store: Store, put: Callable[[], bool]) -> bool:
    """A full queue refuses the tail of a long context. No answer waits for it here, so wait for the queue."""
    try:
        store.flush(_PATIENCE)
    except StoreError:
        return False
    return put()
