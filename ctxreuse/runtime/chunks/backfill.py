"""Indexes the chunks of blocks that no request indexed: imported ones, and those older than the index."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ctxreuse.block.levels import is_approx
from ctxreuse.identity.keys import ROOT, Tokens, prefix_keys
from ctxreuse.reuse import chunks, record
from ctxreuse.runtime.spans import Spans

if TYPE_CHECKING:
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.store.base import Reader, Store
    from ctxreuse.store.types import Entry

__all__ = ["ChunkBackfill"]

#: Blocks that one call looks at.
_MOST = 512
#: Keys that are remembered, of blocks that are stored, and of so many that may have left.
_KEPT, _SLACK = 1 << 17, 4096
#: Allows any level: tokens are read, no planes.
_ANY = 1000.0


class ChunkBackfill:
    """Backfills the chunk index of one runtime's store. Any thread may call.

    Chunks end at content-defined cut points, as the parts of these prompts are not known. A block's key proves that it
    is of this tenant and this model; other blocks are left alone.
    """

    def __init__(self, store: Store, space: ModelSpace, salt: bytes) -> None:
        self._store, self._space, self._salt = store, space, salt
        self._lock = threading.Lock()
        self._fresh: dict[bytes, None] = {}
        self._done: dict[bytes, None] = {}
        self._begun = False
        #: Keys beyond which those of blocks that left are forgotten.
        self._sweep_at = _SLACK
        self._unwatch = store.watch(self._came)

    def _came(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._fresh.update(dict.fromkeys(keys))
            _trim(self._fresh)

    def noted(self, keys: Iterable[bytes]) -> None:
        """Note that the chunks in these blocks were indexed by a request, which knew the prompt's parts."""
        with self._lock:
            for key in keys:
                self._fresh.pop(key, None)
                self._done.pop(key, None)
                self._done[key] = None
            _trim(self._done)
            full = len(self._fresh) + len(self._done) > self._sweep_at
        if full:
            self._sweep()

    def _sweep(self) -> None:
        """Forget the keys of blocks that left. Not under the lock: a store calls `_came` under its own."""
        with self._lock:
            fresh, self._fresh, done = self._fresh, {}, list(self._done)
            self._sweep_at = 2 * _KEPT  # one thread at a time
        left: list[bytes] = []
        try:
            stored = self._store.entries([*fresh, *done])
            left = [key for key, entry in zip(done, stored[len(fresh) :]) if entry is None]
            fresh = dict.fromkeys(key for key, entry in zip(fresh, stored) if entry is not None)
        finally:
            with self._lock:
                self._fresh = fresh | self._fresh
                _trim(self._fresh)
                for key in left:
                    self._done.pop(key, None)  # it may come again
                self._sweep_at = 2 * (len(self._fresh) + len(self._done)) + _SLACK

    def catch_up(self, most: int = _MOST) -> int:
        """Index up to ``most`` blocks that came since the last call, at first all of the store if the index is empty;
        returns how many chunks were indexed. Raises StoreError."""
        with self._lock:
            begins, self._begun = not self._begun, True
        if begins and not len(self._store.chunks):
            self._came([entry.key for entry in self._store.walk()])
        with self._lock:
            keys = list(itertools.islice(self._fresh, most))
            for key in keys:
                del self._fresh[key]
        try:
            return self._look(keys) if keys else 0
        except BaseException:
            self._came(keys)
            raise

    def _look(self, keys: Sequence[bytes]) -> int:
        entries = dict(zip(keys, self._store.entries(keys)))
        with self._lock:
            for key, entry in entries.items():
                if entry is None:
                    self._done.pop(key, None)  # it may come again
            known = {key: entry for key, entry in entries.items() if entry is not None and key not in self._done}
        whole = {key: entry for key, entry in known.items() if entry.tokens == self._space.block_tokens}
        inner = {entry.parent for entry in whole.values()}
        count, read = 0, dict[bytes, Tokens]()
        with self._store.read(_ANY) as reader:
            for tip in whole.keys() - inner:
                count += self._note(reader, tip, whole, read)
        self.noted(known)
        return count

    def _note(self, reader: Reader, tip: bytes, fresh: dict[bytes, Entry], read: dict[bytes, Tokens]) -> int:
        """Note what lies in the fresh blocks of the context that ends with ``tip``; ``read``: tokens that were read."""
        chain = self._chain(tip)
        ids = None if chain is None else self._tokens(reader, chain, read)
        if chain is None or ids is None:
            return 0
        size, keys = self._space.block_tokens, [entry.key for entry in chain]
        since = next(n for n, key in enumerate(keys) if key in fresh) * size
        # An approximate block may hold relocated rows.
        computed: Spans = tuple((n * size, (n + 1) * size) for n, one in enumerate(chain) if not is_approx(one.level))
        return record(self._store.chunks, self._salt, self._space, ids, keys, chunks(ids, since=since), computed)

    def _chain(self, tip: bytes) -> list[Entry] | None:
        """Return the blocks from the first to ``tip``; None if one of them is not stored, or not whole."""
        found: list[Entry] = []
        key = tip
        while key != ROOT:
            (entry,) = self._store.entries([key])
            if entry is None or entry.tokens != self._space.block_tokens:
                return None
            found.append(entry)
            key = entry.parent
        return found[::-1]

    def _tokens(self, reader: Reader, chain: Sequence[Entry], read: dict[bytes, Tokens]) -> Tokens | None:
        """The ids of the context; None if its blocks are not of this model and tenant."""
        for entry in chain:
            if entry.key in read:
                continue
            view = reader.peek(entry.key)
            if view is None or view.header.space != self._space.digest or len(view.tokens) != entry.tokens:
                return None
            read[entry.key] = np.array(view.tokens, "<i4")
        ids = np.concatenate([read[entry.key] for entry in chain])
        proven = prefix_keys(self._space.digest, self._salt, ids, self._space.block_tokens)
        return ids if proven == [entry.key for entry in chain] else None

    def __len__(self) -> int:
        """Keys that are remembered."""
        return len(self._fresh) + len(self._done)

    def close(self) -> None:
        """Stop watching the store."""
        self._unwatch()


def _trim(keys: dict[bytes, None]) -> None:
    """Forget the oldest keys beyond the bound."""
    for key in list(itertools.islice(keys, max(len(keys) - _KEPT, 0))):
        del keys[key]
