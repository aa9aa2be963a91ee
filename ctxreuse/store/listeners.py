"""Callbacks for keys that may have come or gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

__all__ = ["KeyListeners"]


class KeyListeners:
    """Listeners of `Store.watch`. Any thread may call."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[Sequence[bytes]], None], ...] = ()
        self._lock = threading.Lock()

    def add(self, listener: Callable[[Sequence[bytes]], None]) -> Callable[[], None]:
        """Subscribe; the result unsubscribes."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def remove() -> None:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not listener)

        return remove

    def notify(self, keys: Sequence[bytes]) -> None:
        """Call all listeners, unless there are no keys."""
        if keys:
            for listener in self._listeners:
                listener(keys)
