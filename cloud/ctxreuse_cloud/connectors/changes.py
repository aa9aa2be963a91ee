"""What came into a store and what left it, for those who route by it."""

from __future__ import annotations

import threading

from ctxreuse.errors import StoreError
from ctxreuse.recent import keep_newest
from ctxreuse.store import TieredStore

__all__ = ["StoreChanges"]

#: Keys that are remembered between two calls; of more, the oldest are dropped.
_MOST = 1 << 16


class StoreChanges:
    """Keys whose blocks came or left since the last call. Any thread may call."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._keys: dict[bytes, None] = {}
        self._stop = store.watch(self._note)

    def _note(self, keys: object) -> None:
        with self._lock:
            self._keys.update(dict.fromkeys(keys))  # type: ignore[call-overload]
            self._keys = keep_newest(self._keys, _MOST)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return keys that are stored now, and keys that are not. A key may come twice, in either."""
        with self._lock:
            keys, self._keys = list(self._keys), {}
        if not keys:
            return [], []
        try:
            entries = self._store.entries(keys)
        except StoreError:
            return [], []
        stored = [key for key, entry in zip(keys, entries) if entry is not None]
        return stored, [key for key, entry in zip(keys, entries) if entry is None]

    def close(self) -> None:
        """Stop watching."""
        self._stop()
