"""What drafts are made from: the texts of each caller, the newest of them, in bounded memory."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from ctxreuse.identity.keys import Tokens
from ctxreuse.recent import keep_newest
from ctxreuse.speculate.suffix import SuffixIndex

__all__ = ["CallerTexts", "DraftMemory"]

#: Bytes of an index for each token that it keeps, see `SuffixIndex`.
_BYTES = 20
#: Tokens before a text that are appended with it, so that its first ones can follow something.
_OVERLAP = 16
#: Bytes of a caller's name in memory and on disk, and of a block's key.
_NAME = 16


class CallerTexts(msgspec.Struct, frozen=True, array_like=True):
    """The texts of one caller as they are kept on disk: ``caller`` is a hash of its name, ``ids`` little-endian int32
    with -1 between texts, oldest first, ``known`` the keys of the blocks in them."""

    caller: bytes
    ids: bytes
    known: tuple[bytes, ...]


class _Texts:
    """The texts of one caller, and the keys of the blocks in them, the newest last."""

    __slots__ = ("index", "known")

    def __init__(self, tokens: int) -> None:
        self.index, self.known = SuffixIndex(tokens), dict[bytes, None]()


class DraftMemory:
    """Texts of all callers of one tenant, each in an index of its own: none is drafted from another's. Thread-safe.

    Together they take at most ``nbytes``; then the caller that wrote longest ago is forgotten; a single one has all.

    Attributes:
        cleared: how often all was forgotten; what began before that is not to be learnt.
        changes: texts that were appended.
        since: when the oldest text was appended, in seconds since 1970 (0: there is none).
    """

    def __init__(self, nbytes: int = 64 << 20, *, salt: bytes = b"") -> None:
        """``nbytes``: bytes at most, 64 KiB or more; ``salt``: of the tenant, with which names are hashed."""
        self._most, self._salt = nbytes, salt[: hashlib.blake2b.MAX_KEY_SIZE]
        self._lock = threading.Lock()
        self._callers: OrderedDict[bytes, _Texts] = OrderedDict()
        self.cleared, self.changes, self.since = 0, 0, 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all indexes."""
        with self._lock:
            return self._total()

    def _total(self) -> int:
        return sum(texts.index.nbytes for texts in self._callers.values())

    def _name(self, caller: str) -> bytes:
        return hashlib.blake2b(caller.encode("utf-8", "surrogatepass"), digest_size=_NAME, key=self._salt).digest()

    def learn(
        self, caller: str, ids: Tokens, keys: Sequence[bytes], block: int, start: int = 0, cleared: int | None = None
    ) -> None:
        """Append a context of a caller, from token ``start`` on, but no blocks (their prefix ``keys``, of ``block``
        tokens each) that were appended before; nothing if all was forgotten more often than ``cleared`` (None: just
        now)."""
        name = self._name(caller)
        with self._lock:
            if cleared not in (None, self.cleared):
                return
            texts = self._callers.get(name)
            if texts is None:
                texts = self._callers[name] = _Texts(self._most // _BYTES)
            self._callers.move_to_end(name)
            known = start
            for at in range(len(keys), start // block, -1):
                if keys[at - 1][:_NAME] in texts.known:
                    known = at * block
                    break
            for key in keys[known // block :]:
                texts.known[key[:_NAME]] = None
            texts.known = keep_newest(texts.known, texts.index.most // block)  # the text of others was written over
            if known >= len(ids):
                return
            texts.index.add(ids[max(known - _OVERLAP, 0) :])
            self.changes += 1
            self.since = self.since or time.time()
            self._bound()

    def _bound(self) -> None:
        total = self._total()
        while total > self._most and len(self._callers) > 1:
            total -= self._callers.popitem(last=False)[1].index.nbytes

    def index(self, caller: str) -> SuffixIndex | None:
        """Return what a caller said; None: nothing."""
        with self._lock:
            texts = self._callers.get(self._name(caller))
            return None if texts is None else texts.index

    def clear(self) -> None:
        """Forget all texts."""
        with self._lock:
            self._callers.clear()
            self.cleared, self.since = self.cleared + 1, 0.0

    def dump(self) -> tuple[CallerTexts, ...]:
        """Return all texts, for `restore` after a restart."""
        with self._lock:
            return tuple(
                CallerTexts(name, texts.index.newest(len(texts.index)).tobytes(), tuple(texts.known))
                for name, texts in self._callers.items()
            )

    def restore(self, callers: Iterable[CallerTexts], since: float) -> None:
        """Take what `dump` gave. Raises ValueError for what it cannot have given; then nothing is known."""
        try:
            with self._lock:
                for one in callers:
                    texts = self._callers[one.caller] = _Texts(self._most // _BYTES)
                    texts.known.update(dict.fromkeys(one.known))
                    ids = np.frombuffer(one.ids, "<i4")
                    for text in np.split(ids, np.flatnonzero(ids == -1)):
                        texts.index.add(text[1:] if len(text) and text[0] == -1 else text)
                    self._bound()
                self.since = since if self._callers else 0.0
        except ValueError:
            self.clear()
            raise

    def check(self) -> None:
        """Raise AssertionError where bounds are exceeded."""
        with self._lock:
            assert self._total() <= self._most or len(self._callers) == 1, "too many bytes"
            for texts in self._callers.values():
                assert len(texts.index) <= texts.index.most, "too many tokens"
                assert len(texts.known) <= texts.index.most, "too many keys"
                assert texts.index.nbytes <= _BYTES * texts.index.most + (1 << 16), "an index is too large"
                assert all(len(key) == _NAME for key in texts.known), "a key of another length"
