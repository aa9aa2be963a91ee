"""What tells a store's policy of the traffic, and keeps what it learnt beside the blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import lmdb

from ctxreuse.errors import StoreError
from ctxreuse.store.env import Env
from ctxreuse.store.listing import DiskListing
from ctxreuse.store.policy import Policy, Standing

__all__ = ["GuidedStore", "recall", "sealed"]

#: Where it lies in the table ``info``; the format's version comes first.
_WHERE: Final = b"policy"
_VERSION: Final = b"policy 1\n"
_DIGEST, _LIMIT = 16, 1 << 18


def sealed(policy: Policy[bytes]) -> bytes | None:
    """What a policy learnt with its name and a checksum; None for one that learns nothing."""
    if not hasattr(policy, "dump"):
        return None
    learnt: bytes = policy.dump()
    body = _VERSION + policy.name.encode() + b"\n" + learnt
    return hashlib.blake2b(body, digest_size=_DIGEST).digest() + body


def recall(env: Env, policy: Policy[bytes]) -> bool:
    """Give a fresh policy what one of its name learnt here before; False if that is not there or not sound."""
    try:
        with env.read() as txn:
            raw = txn.get(_WHERE, db=env.tables["info"])
            raw = bytes(raw) if raw is not None and len(raw) <= _LIMIT else b""
    except (lmdb.Error, StoreError):
        return False
    digest, body = raw[:_DIGEST], raw[_DIGEST:]
    head = _VERSION + policy.name.encode() + b"\n"
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != digest or not body.startswith(head):
        return False
    return hasattr(policy, "load") and bool(policy.load(body[len(head) :]))


class GuidedStore(DiskListing):
    """The part of a `BlockStore` that its policy learns from. Any thread may call."""

    def asked(self, keys: Sequence[bytes], tokens: int) -> None:
        """See ``StoreAdmin.asked``."""
        with self._lock:
            self._index.asked(keys, tokens)

    def touch(self, keys: Sequence[bytes], *, needed: bool = False) -> None:
        """See ``StoreAdmin.touch``."""
        with self._lock:
            self._index.touch(keys, needed)

    def mark(self, keys: Sequence[bytes], label: int) -> None:
        """See ``StoreAdmin.mark``."""
        with self._lock:
            self._index.mark(keys, label)

    def price(self, per_token: float, per_pair: float) -> None:
        """See ``StoreAdmin.price``."""
        with self._lock:
            if hasattr(self._index.policy, "price"):
                self._index.policy.price(per_token, per_pair)

    def _standing(self) -> Standing | None:
        """How the duel stands; None under a single policy."""
        return getattr(self._index.policy, "standing", None)

    def _note_learnt(self, txn: Any) -> None:
        """Write what was learnt, within a transaction that is committed with the rest."""
        with self._lock:
            raw = sealed(self._index.policy)
        if raw is not None and len(raw) <= _LIMIT:
            txn.put(_WHERE, raw, db=self._env.tables["info"])
