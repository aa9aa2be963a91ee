"""What a device's store holds, as a cloud would name it: the order to give it in, and keys made with a link's salt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block import Kind, rekey
from ctxreuse.bus.sync_exact import exact_bytes, exact_nbytes
from ctxreuse.errors import CtxReuseError, FormatError
from ctxreuse.keys import ROOT, prefix_key, tenant_salt
from ctxreuse.store.base import Entry, WholeStore

__all__ = ["Holdings", "Run", "Translation"]

#: Headers that are read in one transaction: a few milliseconds.
_BATCH = 16
_RUN_BLOCKS = 64


class _Said(NamedTuple):
    """What a block's header says that the store does not keep in memory, and the size of its sealed bytes."""

    space: bytes
    tokens: bytes
    nbytes: int


class Run(NamedTuple):
    """Consecutive blocks to offer together: the store's keys and entries, all of one space."""

    space: bytes
    keys: tuple[bytes, ...]
    parent: bytes
    sizes: tuple[int, ...]


class Holdings:
    """The contexts of one tenant in a store. One thread calls `refresh`; the rest is for any, on what it found."""

    def __init__(self, store: WholeStore, tenant: str) -> None:
        self.store = store
        self._salt = tenant_salt(tenant)
        self._said: dict[bytes, _Said] = {}
        self._mine: dict[bytes, bool] = {}
        self.entries: dict[bytes, Entry] = {}
        self.order: list[bytes] = []

    def refresh(self, stopped: Callable[[], bool]) -> bool:
        """Look at the store anew; False if it was ``stopped`` before the end. Reads headers of what is new, in short
        transactions."""
        self.entries = {entry.key: entry for entry in self.store.walk()}
        self._said = {key: said for key, said in self._said.items() if key in self.entries}
        fresh = [key for key in self.entries if key not in self._said]
        for start in range(0, len(fresh), _BATCH):
            if stopped():
                return False
            with self.store.read() as reader:
                for key in fresh[start : start + _BATCH]:
                    view = reader.peek(key)
                    if view is not None:
                        with contextlib.suppress(FormatError):
                            nbytes = exact_nbytes(view)
                            self._said[key] = _Said(view.header.space, view.header.tokens, nbytes)
                    del view
        self._mine = {}
        for key, entry in self.entries.items():  # parents first
            said = self._said.get(key)
            if said is None:
                continue
            if entry.parent == ROOT:
                tokens = np.frombuffer(said.tokens, "<i4")
                # Contexts of other tenants of this device are none of a cloud's business.
                self._mine[key] = prefix_key(said.space, self._salt, ROOT, tokens) == key
            else:
                self._mine[key] = self._mine.get(entry.parent, False)
        self.order = self._ancestors_first(key for key in self.store.recent() if self._mine.get(key))
        return True

    def _ancestors_first(self, keys: Iterator[bytes]) -> list[bytes]:
        placed: dict[bytes, None] = {}
        for tip in keys:
            path, key = [], tip
            while key != ROOT and key not in placed:
                path.append(key)
                key = self.entries[key].parent
            placed.update(dict.fromkeys(reversed(path)))
        return list(placed)

    def said(self, key: bytes) -> _Said:
        """What the header of one of ``order`` says."""
        return self._said[key]

    def runs(self, keys: Sequence[bytes], limit: int) -> Iterator[Run]:
        """Cut ``keys`` (in the order of ``order``) into runs of consecutive blocks, each of up to ``limit`` bytes."""
        run: list[bytes] = []
        nbytes = 0
        for key in keys:
            size = self._said[key].nbytes
            follows = run and self.entries[key].parent == run[-1]
            if run and (not follows or nbytes + size > limit or len(run) == _RUN_BLOCKS):
                yield self._run(run)
                run, nbytes = [], 0
            run.append(key)
            nbytes += size
        if run:
            yield self._run(run)

    def _run(self, keys: list[bytes]) -> Run:
        parent = self.entries[keys[0]].parent
        return Run(self._said[keys[0]].space, tuple(keys), parent, tuple(self._said[key].nbytes for key in keys))


class Translation:
    """Keys of the blocks of ``holdings`` on one link. Made with the link's ``salt``; kept from round to round."""

    def __init__(self, holdings: Holdings, salt: bytes) -> None:
        self.salt = salt
        self._holdings = holdings
        self._keys: dict[bytes, bytes] = {ROOT: ROOT}

    def refresh(self) -> None:
        """Translate what is new in ``holdings.order`` and forget what has gone."""
        before, holdings = self._keys, self._holdings
        keys = {ROOT: ROOT}
        for key in holdings.order:
            known = before.get(key)
            if known is None:
                said, parent = holdings.said(key), holdings.entries[key].parent
                known = prefix_key(said.space, self.salt, keys[parent], np.frombuffer(said.tokens, "<i4"))
            keys[key] = known
        self._keys = keys

    def key(self, key: bytes) -> bytes:
        """The link's key of a block (ROOT for ROOT)."""
        return self._keys[key]

    def read(self, key: bytes, kind: Kind) -> npt.NDArray[np.uint8]:
        """Sealed bytes of a held block or state under the link's keys, exact and raw however it is kept. LookupError if
        it is gone, or held with loss by now. Any thread."""
        try:
            with self._holdings.store.read() as reader:
                view = reader.peek(key, kind)
                if view is None:
                    raise LookupError(key.hex()[:16])
                try:
                    view.verify()  # a cloud takes damage for a lie when it goes on
                    return rekey(exact_bytes(view), self._keys[key], self._keys[view.header.parent])
                finally:
                    del view
        except CtxReuseError as error:
            raise LookupError(str(error)) from None
