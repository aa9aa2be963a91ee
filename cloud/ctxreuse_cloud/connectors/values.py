"""KV that another cache names by its own hashes: opaque values in a store, beside blocks.

LMCache and SGLang hand over the bytes of a chunk with a hash of theirs and without its token ids, of which our keys are
made. So such a chunk becomes a block of one plane of bytes, under a key of that hash: it is checked, evicted, recovered
and bounded as all others are, and shared with engines that reach the store through the same door, not with others.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import MAX_TOKENS, BlockWriter, Plane, layout_of
from ctxreuse.errors import FormatError, StoreError
from ctxreuse.identity.keys import ROOT, Tokens, tenant_salt
from ctxreuse.pauses.envelope import HintOrder
from ctxreuse_cloud.connectors.access import StoreAccess
from ctxreuse_cloud.connectors.changes import StoreChanges

__all__ = ["Value", "ValueSpace", "ValueStore"]

log = logging.getLogger(__name__)

#: Seconds to wait for a full queue of writes.
_PATIENCE = 10.0
_ROLE = "value"
#: Ids of a value at least: all of the digest that stands in them.
_DIGEST_IDS = 8


class Value(NamedTuple):
    """One value: its key, the digest of its space, and what its bytes are, as ids that are compared when it is read."""

    key: bytes
    space: bytes
    ids: Tokens


class ValueSpace:
    """What values of one kind have in common.

    Args:
        door: what names them, such as ``lmcache``.
        facts: all that the bytes depend on and the name does not say: model, rank, whatever the door knows.
        secret: makes keys of tenants unguessable.
    """

    def __init__(self, door: str, facts: Sequence[str | int], secret: bytes = b"") -> None:
        self.digest = hashlib.sha256(json.dumps(["ctxreuse/values/1", door, *facts]).encode()).digest()
        self._secret = secret

    def key(self, name: bytes, tenant: str = "") -> bytes:
        """Return the key of the value of that name."""
        salt = tenant_salt(tenant, self._secret)
        return hashlib.sha256(b"ctxreuse/value/1" + self.digest + salt + name).digest()

    def value(self, name: bytes, shape: str, tokens: int, tenant: str = "") -> Value:
        """Return the value of that name.

        Args:
            name: a hash of all that its tokens follow and are.
            shape: numeric types and shapes: bytes of another shape under the name are a miss.
            tokens: that it covers, for the eviction policy.
            tenant: what separates it from those of others.
        """
        digest = np.frombuffer(hashlib.sha256(shape.encode()).digest(), "<i4") & 0x7FFFFFFF
        count = max(_DIGEST_IDS, min(tokens, MAX_TOKENS))
        return Value(self.key(name, tenant), self.digest, np.resize(digest, count))


class ValueStore:
    """Values in a store that other doors of the process share. Any thread may call; nothing raises for a bad store."""

    def __init__(self, access: StoreAccess, *, writes: bool) -> None:
        """Use a store, as its writer if this process ``writes`` and no other does."""
        self._access = access
        if writes:
            access.writing()  # now: to open it again later would disturb those that read

    def find(self, keys: Sequence[bytes], *, use: bool = True) -> list[bool]:
        """Return for each key if a value is stored; with ``use`` those that are count as used, and are evicted last.

        To count takes the eviction policy ten times as long as to look.
        """
        store = self._access.reading()
        if store is None:
            return [False] * len(keys)
        try:
            found = [entry is not None for entry in store.entries(keys)]
            if use:
                store.touch([key for key, there in zip(keys, found) if there])
        except StoreError as error:
            log.warning("a lookup failed and counts as a miss: %s", error)
            return [False] * len(keys)
        return found

    def load(self, value: Value, into: Sequence[memoryview], *, shorter: bool = False) -> int:
        """Copy a value into parts of memory that have its size; returns its bytes, 0 if it is not there whole.

        ``shorter``: it may have fewer bytes than the memory. Nothing is copied where 0 is returned.
        """
        store = self._access.reading()
        if store is None:
            return 0
        try:
            with store.read() as reader:
                view = reader.block(value.key, value.ids, value.space)
                data = view.plane(0, _ROLE) if view is not None else None
                room = sum(part.nbytes for part in into)
                if data is None or data.nbytes > room or (data.nbytes < room and not shorter):
                    return 0
                at = 0
                for part in into:
                    piece = data[at : at + part.nbytes]
                    part.cast("B")[: piece.nbytes] = piece
                    at += piece.nbytes
                return at
        except FormatError as error:
            log.warning("a damaged value is computed again: %s", error)
            store.drop(value.key, "corrupt")
        except StoreError as error:
            log.warning("a value was not loaded: %s", error)
        return 0

    def save(self, values: Sequence[tuple[Value, Sequence[memoryview]]]) -> list[bool]:
        """Store values of one or more parts, which this copies; True for those committed, or stored before."""
        store = self._access.writing()
        if store is None:
            return [False] * len(values)
        saved = []
        try:
            for value, parts in values:
                if store.entries([value.key])[0] is not None:
                    saved.append(True)
                    continue
                sealed = _sealed(value, parts)
                accepted = store.put(value.key, sealed)
                if not accepted:
                    store.flush(_PATIENCE)  # a full queue of writes
                    accepted = store.put(value.key, sealed)
                saved.append(accepted)
            store.flush(_PATIENCE)
        except StoreError as error:
            log.warning("values were not saved: %s", error)
            return [False] * len(values)
        return saved

    def drop(self, keys: Iterable[bytes], reason: str) -> None:
        """Remove values, if this process writes the store."""
        store = self._access.writing()
        if store is not None:
            for key in keys:
                store.drop(key, reason)

    def hint(self, keys: Iterable[bytes], order: HintOrder) -> None:
        """Keep values longer, or let them go, as a hint asks, if this process writes the store."""
        for key in keys:
            self._access.hint([key], order)

    def changes(self) -> StoreChanges | None:
        """Watch what comes into the store and leaves it; None if this process does not write it."""
        store = self._access.writing()
        return StoreChanges(store) if store is not None else None

    def close(self) -> None:
        """Close the store, unless another door of the process uses it."""
        self._access.close()


def _sealed(value: Value, parts: Sequence[memoryview]) -> npt.NDArray[np.uint8]:
    """Return the bytes of a block that holds the parts one after another."""
    plane = Plane(0, _ROLE, "uint8", (sum(part.nbytes for part in parts),))
    writer = BlockWriter(
        layout_of((plane,)),
        kind="block",
        space=value.space,
        key=value.key,
        parent=ROOT,
        end=len(value.ids),
        tokens=value.ids,
    )
    into, at = writer.plane(0, _ROLE).data, 0
    for part in parts:
        into[at : at + part.nbytes] = part.cast("B")
        at += part.nbytes
    return writer.seal()
