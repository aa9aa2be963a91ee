"""What drafts are made from: the texts of each caller, the newest of them, in bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from ctxreuse.identity.keys import Tokens
from ctxreuse.speculate.suffix import SuffixIndex

__all__ = ["DraftMemory"]

#: Bytes of an index for each token that it keeps, see `SuffixIndex`.
_BYTES = 20
#: Tokens before a text that are appended with it, so that its first ones can follow something.
_OVERLAP = 16


class DraftMemory:
    """Texts of all callers of one tenant, each in an index of its own: none is drafted from another's. Thread-safe.

    Together they take at most ``nbytes``; then the caller that wrote longest ago is forgotten; a single one has all.
    """

    def __init__(self, nbytes: int = 64 << 20) -> None:
        """``nbytes``: bytes at most, 64 KiB or more."""
        self._most = nbytes
        self._lock = threading.Lock()
        self._indexes: OrderedDict[str, SuffixIndex] = OrderedDict()
        #: Keys of the blocks whose texts are known, the newest last.
        self._known: OrderedDict[bytes, None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all indexes."""
        with self._lock:
            return sum(index.nbytes for index in self._indexes.values())

    def learn(self, caller: str, ids: Tokens, keys: Sequence[bytes], block: int, start: int = 0) -> None:
        """Append a context of a caller, from token ``start`` on, but no blocks (their prefix ``keys``, of ``block``
        tokens each) that were appended before."""
        with self._lock:
            known = start
            for at in range(len(keys), start // block, -1):
                if keys[at - 1] in self._known:
                    known = at * block
                    break
            for key in keys[known // block :]:
                self._known[key] = None
            while len(self._known) > self._most // (_BYTES * block):
                self._known.popitem(last=False)
            if known >= len(ids):
                return
            index = self._indexes.get(caller)
            if index is None:
                index = self._indexes[caller] = SuffixIndex(self._most // _BYTES)
            self._indexes.move_to_end(caller)
            index.add(ids[max(known - _OVERLAP, 0) :])
            total = sum(one.nbytes for one in self._indexes.values())
            while total > self._most and len(self._indexes) > 1:
                total -= self._indexes.popitem(last=False)[1].nbytes
                self._known.clear()  # some of these were theirs

    def index(self, caller: str) -> SuffixIndex | None:
        """Return what a caller said; None: nothing."""
        with self._lock:
            return self._indexes.get(caller)

    def clear(self) -> None:
        """Forget all texts."""
        with self._lock:
            self._indexes.clear()
            self._known.clear()
