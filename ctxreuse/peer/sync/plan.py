"""Blocks of a store to send to a cloud: their order, keys under a link's salt, and exact bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, Kind, Layout, Plane, rekey, reseal, rewriter
from ctxreuse.block.levels import EXACT, PACKED
from ctxreuse.codec.lossless import plane_of, unpack_plane
from ctxreuse.errors import CtxReuseError, FormatError
from ctxreuse.identity.keys import ROOT, prefix_key, tenant_salt
from ctxreuse.store.base import Store
from ctxreuse.store.types import Entry

__all__ = ["Holdings", "Run", "Translation"]

#: Headers that are read in one transaction: a few milliseconds.
_BATCH = 16
_RUN_BLOCKS = 64


def exact_nbytes(view: BlockView) -> int:
    """Return the bytes of a block or state once unpacked. Raises FormatError for streams without it."""
    if view.header.level != PACKED:
        return len(view.buffer)
    return rewriter(view, layout=_exact_layout(view), level=EXACT).buffer.nbytes


def exact_bytes(view: BlockView) -> npt.NDArray[np.uint8]:
    """Return the sealed bytes of an exact block or state with raw planes, without a copy if it is not packed. Raises
    FormatError for damaged bytes."""
    if view.header.level != PACKED:
        return np.frombuffer(view.buffer, np.uint8)
    made = {}
    for plane in view.layout.planes:
        array, _ = unpack_plane(view.plane(plane.layer, plane.role))
        made[plane.layer, plane.role] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    return reseal(view, made, layout=_exact_layout(view), level=EXACT)


def _exact_layout(view: BlockView) -> Layout:
    planes = []
    for plane in view.layout.planes:
        dtype, shape = plane_of(view.plane(plane.layer, plane.role, verify=False))
        planes.append(Plane(plane.layer, plane.role, dtype, tuple(shape)))
    return Layout(tuple(planes))


class _HeaderInfo(NamedTuple):
    """Header fields that the store does not keep in memory, and the size of the exact bytes."""

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

    def __init__(self, store: Store, tenant: str) -> None:
        self.store = store
        self._salt = tenant_salt(tenant)
        self._headers: dict[bytes, _HeaderInfo] = {}
        self._mine: dict[bytes, bool] = {}
        #: Who gave each block that was fetched; who gave what a block was computed on top of (b"": nobody).
        self.givers: dict[bytes, bytes] = {}
        self._origins: dict[bytes, bytes] = {}
        self.entries: dict[bytes, Entry] = {}
        self.order: list[bytes] = []

    def refresh(self, stopped: Callable[[], bool]) -> bool:
        """Read the store's contents again (headers of new blocks, in short transactions); returns False if
        ``stopped``."""
        self.entries = {entry.key: entry for entry in self.store.walk()}
        self._headers = {key: info for key, info in self._headers.items() if key in self.entries}
        fresh = [key for key in self.entries if key not in self._headers]
        for start in range(0, len(fresh), _BATCH):
            if stopped():
                return False
            with self.store.read() as reader:
                for key in fresh[start : start + _BATCH]:
                    view = reader.peek(key)
                    if view is not None:
                        with contextlib.suppress(FormatError):
                            nbytes = exact_nbytes(view)
                            self._headers[key] = _HeaderInfo(view.header.space, view.header.tokens, nbytes)
                    del view
        self._mine, self._origins, self.givers = {}, {}, self.store.givers()
        for key, entry in self.entries.items():  # parents first
            self._origins[key] = self.givers.get(key) or self._origins.get(entry.parent, b"")
            info = self._headers.get(key)
            if info is None:
                continue
            if entry.parent == ROOT:
                tokens = np.frombuffer(info.tokens, "<i4")
                # Contexts of other tenants of this device stay here.
                self._mine[key] = prefix_key(info.space, self._salt, ROOT, tokens) == key
            else:
                # A partial block, which is soon replaced, stays here too.
                above = self.entries.get(entry.parent)  # None: it has just been evicted
                whole = above is not None and entry.tokens == above.tokens
                self._mine[key] = whole and self._mine.get(entry.parent, False)
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

    def own(self, key: bytes, giver: bytes) -> bool:
        """Return True if a block was computed here, on top of nothing but what was computed here or by ``giver``.

        Only such a block may be given to ``giver``: for all others this device would answer.
        """
        return key not in self.givers and self._origins.get(key, b"") in (b"", giver)

    def header(self, key: bytes) -> _HeaderInfo:
        """Return the header of one of ``order``."""
        return self._headers[key]

    def runs(self, keys: Sequence[bytes], limit: int) -> Iterator[Run]:
        """Cut ``keys`` (sorted like ``order``) into runs of consecutive blocks of up to ``limit`` bytes each."""
        run: list[bytes] = []
        nbytes = 0
        for key in keys:
            size = self._headers[key].nbytes
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
        return Run(self._headers[keys[0]].space, tuple(keys), parent, tuple(self._headers[key].nbytes for key in keys))


class Translation:
    """Keys of the blocks of ``holdings`` under a link's ``salt``, kept from round to round."""

    def __init__(self, holdings: Holdings, salt: bytes) -> None:
        self.salt = salt
        self._holdings = holdings
        self._keys: dict[bytes, bytes] = {ROOT: ROOT}

    def refresh(self) -> None:
        """Translate the new keys in ``holdings.order``, forget removed ones."""
        before, holdings = self._keys, self._holdings
        keys = {ROOT: ROOT}
        for key in holdings.order:
            known = before.get(key)
            if known is None:
                info, parent = holdings.header(key), holdings.entries[key].parent
                known = prefix_key(info.space, self.salt, keys[parent], np.frombuffer(info.tokens, "<i4"))
            keys[key] = known
        self._keys = keys

    def key(self, key: bytes) -> bytes:
        """Return the link's key of a block (ROOT for ROOT)."""
        return self._keys[key]

    def read(self, key: bytes, kind: Kind) -> npt.NDArray[np.uint8]:
        """Return the sealed bytes of a block or state under the link's keys, exact and raw however it is stored. Raises
        LookupError if it is gone, or stored with loss by now. Any thread."""
        try:
            with self._holdings.store.read() as reader:
                view = reader.peek(key, kind)
                if view is None:
                    raise LookupError(key.hex()[:16])
                try:
                    view.verify()  # a cloud quarantines peers that keep sending damage
                    return rekey(exact_bytes(view), self._keys[key], self._keys[view.header.parent])
                finally:
                    del view
        except CtxReuseError as error:
            raise LookupError(str(error)) from None
