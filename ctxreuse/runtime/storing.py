"""What a finished context leaves in the store: its new whole blocks, its states, and where its chunks lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from ctxreuse.engines.moving import MovedLive
from ctxreuse.errors import StoreError
from ctxreuse.keys import ROOT, Tokens
from ctxreuse.levels import is_approx
from ctxreuse.reuse import record
from ctxreuse.runtime.arrivals import Arrivals, sealed
from ctxreuse.runtime.keeping import Keeping
from ctxreuse.runtime.refining import Refining
from ctxreuse.runtime.spans import Spans, together, within, without

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ctxreuse.block import BlockView
    from ctxreuse.engines.base import Engine, Live
    from ctxreuse.runtime.remote import Fetch
    from ctxreuse.store.base import WholeStore

__all__ = ["Storing"]

# Seconds to wait for a full queue of writes: at 0.1 GB/s the default queue of 256 MiB is empty in three.
_PATIENCE = 10.0
#: Computed tokens hang on the moved ones before them, which are stored once more for their sake. That is worth it for
#: at least so many computed ones in a row, and if the moved ones are at most so many times as many.
_WORTH, _TIMES = 64, 8


_EVER = 1 << 62


class _Noted(NamedTuple):
    """Where parts of a context's prompt end, how much of it an earlier request of the same context has noted, and which
    spans of it were computed now."""

    parts: tuple[int, ...]
    since: int
    computed: Spans


class Storing:
    """One runtime's way into its store. `keep` is called by the thread that holds the runtime's compute lock."""

    def __init__(
        self, engine: Engine, keeping: Keeping, keys: Callable[[Tokens], list[bytes]], salt: bytes = b""
    ) -> None:
        self._engine, self._keeping, self._keys, self._salt = engine, keeping, keys, salt
        self._lock = threading.Lock()
        self._noted: WeakKeyDictionary[Live, _Noted] = WeakKeyDictionary()
        #: What came encoded from elsewhere is stored as it came.
        self.arrivals = Arrivals()
        self._refining = Refining()

    def note(self, live: Live, parts: Sequence[int], since: int, computed: Sequence[tuple[int, int]]) -> None:
        """A prompt was brought into ``live``: its ``parts``, its leading tokens that were in memory already, and the
        spans that were ``computed``."""
        with self._lock:
            self._noted[live] = _Noted(tuple(parts), since, together((*computed, (live.n, _EVER))))

    def index(self, store: WholeStore, live: Live, keys: Sequence[bytes]) -> bool:
        """Note where the chunks of a context lie, whose blocks ``keys`` were put, so that other prompts find them.

        False if nothing is known of its prompt.
        """
        with self._lock:
            noted = self._noted.pop(live, None)
        if noted is None:
            return False
        # An approximate block that was loaded may hold rows that were moved when it was made.
        loaded = without([(run.start, run.end) for run in live.levels if is_approx(run.level)], noted.computed)
        known = without(((0, live.n),), (*_moved(live), *loaded))
        record(store.chunks, self._salt, self._engine.space, live.tokens, keys, known, noted.parts, noted.since)
        return True

    def _offered(self, live: Live) -> int:
        """Tokens of a context, from its beginning, that are worth storing: what holds nothing but moved rows is held
        elsewhere."""
        moved = _moved(live)
        if not moved:
            return live.n
        stop = 0
        for start, end in without(((0, live.n),), moved):
            copied = sum(b - a for a, b in within(moved, ((stop, end),)))
            if end - start >= _WORTH and copied <= _TIMES * (end - stop - copied):
                stop = end
        return stop

    def keep(self, store: WholeStore | None, live: Live, lossy: str | None) -> list[bytes]:
        """Offer the store the whole blocks and states of ``live`` that it lacks; stop at the first refusal. Returns the
        keys of all that are worth it."""
        engine, size = self._engine, self._engine.space.block_tokens
        keys = self._keys(live.tokens)[: -(-self._offered(live) // size)]
        if store is None:
            return keys
        arrived = self.arrivals.take(live)
        if arrived.late is not None:
            self._refine(store, arrived.late, arrived.blocks, keys, lossy)
        admitted = self._keeping.admitted(store, live, keys, lossy)
        held = store.match(keys, lossy).blocks
        fresh = keys[held:]
        if fresh:
            parent = keys[held - 1] if held else ROOT
            for key, data in sealed(engine, live, fresh, parent, held, arrived.blocks):
                if not (store.put(key, data, lossy=lossy) or _put_later(store, key, data, lossy)):
                    return keys
        for position in admitted:
            n = position // size
            data = engine.export_state(live, keys[n - 1], keys[n - 2] if n > 1 else ROOT, position)
            self._keeping.learn(data.nbytes)
            store.put(keys[n - 1], data, kind="state", lossy=lossy)
        return keys

    def _refine(
        self, store: WholeStore, late: Fetch, blocks: Mapping[int, BlockView], keys: Sequence[bytes], lossy: str | None
    ) -> None:
        """Have blocks that came coarse kept finer when their refinements are here."""
        codec = self._engine.codec
        last = max(blocks)
        run = [(keys[i], keys[i - 1] if i else ROOT, blocks[i]) for i in range(last, -1, -1) if i in blocks][::-1]
        if codec is None or last >= len(keys) or len(run) != last - min(blocks) + 1:
            late.stop()
            return
        self._refining.add(codec, late, run, partial(store.put, lossy=lossy))

    def close(self) -> None:
        """Stop waiting for refinements."""
        self._refining.close()


def _moved(live: Live) -> Spans:
    return live.moved if isinstance(live, MovedLive) else ()


def _put_later(store: WholeStore, key: bytes, data: npt.NDArray[np.uint8], lossy: str | None) -> bool:
    """A full queue refuses the tail of a long context: here nobody waits for an answer, so wait for the queue."""
    try:
        store.flush(_PATIENCE)
    except StoreError:
        return False
    return store.put(key, data, lossy=lossy)
