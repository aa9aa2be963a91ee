"""Blocks whose chunks nobody noted, as they were imported or are older than the index: found, proven, noted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ctxreuse.keys import ROOT, Tokens, prefix_keys
from ctxreuse.levels import is_approx
from ctxreuse.reuse import record
from ctxreuse.runtime.spans import Spans

if TYPE_CHECKING:
    from ctxreuse.model import ModelSpace
    from ctxreuse.store.base import Entry, Reader, WholeStore

__all__ = ["Homing"]

#: Blocks that one call looks at.
_MOST = 512
#: Keys that are remembered.
_KEPT = 1 << 17
#: Worse than any level that a store keeps: tokens are read, no planes.
_ANY = "kl-1000"


class Homing:
    """One runtime's notes on its store. Any thread may call.

    Chunks end where content says, as nobody knows the parts that these prompts had. A block's key proves that it is of
    this tenant and of this model: what lies under others is left alone.
    """

    def __init__(self, store: WholeStore, space: ModelSpace, salt: bytes) -> None:
        self._store, self._space, self._salt = store, space, salt
        self._lock = threading.Lock()
        self._fresh: dict[bytes, None] = {}
        self._done: dict[bytes, None] = {}
        self._begun = False
        self._unwatch = store.watch(self._came)

    def _came(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._fresh.update(dict.fromkeys(keys))
            _trim(self._fresh)

    def noted(self, keys: Iterable[bytes]) -> None:
        """The chunks in these blocks were noted, by somebody who knew the prompt's parts."""
        with self._lock:
            for key in keys:
                self._fresh.pop(key, None)
                self._done.pop(key, None)
                self._done[key] = None
            _trim(self._done)

    def catch_up(self, most: int = _MOST) -> int:
        """Look at up to ``most`` blocks that came since the last call, at first at all if the index knows nothing;
        returns how many chunks were noted. Raises StoreError."""
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
        held = dict(zip(keys, self._store.entries(keys)))
        with self._lock:
            for key, entry in held.items():
                if entry is None:
                    self._done.pop(key, None)  # it may come again
            known = {key: entry for key, entry in held.items() if entry is not None and key not in self._done}
        inner = {entry.parent for entry in known.values()}
        count, read = 0, dict[bytes, Tokens]()
        with self._store.read(_ANY) as reader:
            for tip in known.keys() - inner:
                count += self._note(reader, tip, known, read)
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
        # An approximate block may hold rows that were moved when it was made.
        computed: Spans = tuple((n * size, (n + 1) * size) for n, one in enumerate(chain) if not is_approx(one.level))
        return record(self._store.chunks, self._salt, self._space, ids, keys, computed, (), since)

    def _chain(self, tip: bytes) -> list[Entry] | None:
        """The blocks from the first on to ``tip``; None if one of them is not held, or is no whole block."""
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

    def close(self) -> None:
        """Listen no more."""
        self._unwatch()


def _trim(keys: dict[bytes, None]) -> None:
    """Forget the oldest keys beyond the bound."""
    for key in list(itertools.islice(keys, max(len(keys) - _KEPT, 0))):
        del keys[key]
