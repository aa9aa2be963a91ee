"""What a text model made of texts that come again: a chat sends all of its turns with each question."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ["RememberedTexts"]

T = TypeVar("T")

#: Bytes of results that are kept: ids of two million tokens.
_LIMIT: Final = 8 << 20
#: Bytes that an entry takes besides its result.
_ENTRY: Final = 256


class RememberedTexts(Generic[T]):
    """Results of one function of texts, found by a digest of the text; those not used for longest leave first.

    Any thread may call.
    """

    def __init__(self, size: Callable[[T], int], limit: int = _LIMIT) -> None:
        """``size``: bytes of a result; ``limit``: of all."""
        self._size, self._limit = size, limit
        self._lock, self._nbytes = threading.Lock(), 0
        self._found: OrderedDict[bytes, tuple[T, int]] = OrderedDict()

    def get(self, text: bytes, how: str, make: Callable[[], T]) -> T:
        """Return what ``make`` returns, or has returned for this text and ``how``; it is not to be changed."""
        key = hashlib.blake2b(text, digest_size=16, person=how.encode()).digest()
        with self._lock:
            known = self._found.get(key)
            if known is not None:
                self._found.move_to_end(key)
                return known[0]
        made = make()
        size = self._size(made) + _ENTRY
        with self._lock:
            if key not in self._found and size <= self._limit:
                self._found[key], self._nbytes = (made, size), self._nbytes + size
                while self._nbytes > self._limit:
                    self._nbytes -= self._found.popitem(last=False)[1][1]
        return made
