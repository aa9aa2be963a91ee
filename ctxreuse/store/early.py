"""Labels of pauses that came before the blocks of their contexts were written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["EarlyMarks"]

#: Contexts whose last block may be awaited at a time.
_MOST = 1024


class EarlyMarks:
    """Label by the key that it is for. Not thread-safe: its index's owner serialises the calls."""

    def __init__(self) -> None:
        self._labels: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._labels)

    def note(self, key: bytes, label: int) -> None:
        """The context that ends at ``key``, which is not held yet, paused for the reason ``label``."""
        self._labels[key] = label
        if len(self._labels) > _MOST:
            del self._labels[next(iter(self._labels))]

    def void(self, keys: Iterable[bytes]) -> None:
        """These contexts are needed again: what they paused for is over."""
        for key in keys if self._labels else ():
            self._labels.pop(key, None)

    def take(self, written: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
        """Labels of keys that are held now, each once."""
        for key in written if self._labels else ():
            label = self._labels.pop(key, None)
            if label is not None:
                yield key, label
