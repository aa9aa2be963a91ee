"""What an eviction policy learnt, kept beside the blocks: a digest, the version, the policy's name and its dump."""

from __future__ import annotations

import hashlib
from typing import Any

import lmdb

from ctxreuse.errors import StoreError
from ctxreuse.store.lmdb.env import Env
from ctxreuse.store.policy import Policy

__all__ = ["load_learnt", "save_learnt", "sealed"]

#: Its key in table ``info``.
_KEY, _VERSION = b"policy", b"policy 1\n"
_DIGEST, _MOST = 16, 1 << 18


def sealed(policy: Policy[bytes]) -> bytes:
    """Return a policy's dump with its name and a checksum; b"" if it learns nothing or too much."""
    learnt = policy.dump()
    body = _head(policy) + learnt
    raw = _digest(body) + body
    return raw if learnt and len(raw) <= _MOST else b""


def save_learnt(env: Env, learnt: bytes) -> None:
    """Write what `sealed` returned, if it is anything."""
    if learnt:
        env.write(lambda txn: txn.put(_KEY, learnt, db=env.tables["info"]))


def load_learnt(env: Env, policy: Policy[bytes]) -> None:
    """Give a new policy what one of its name learnt here before, if that is there and sound."""
    try:
        with env.read() as txn:
            found: Any = txn.get(_KEY, db=env.tables["info"])
            raw = bytes(found) if found is not None and len(found) <= _MOST else b""
    except (lmdb.Error, StoreError):
        return
    digest, body, head = raw[:_DIGEST], raw[_DIGEST:], _head(policy)
    if _digest(body) == digest and body.startswith(head):
        policy.load(body[len(head) :])


def _head(policy: Policy[bytes]) -> bytes:
    return _VERSION + policy.stored_name.encode() + b"\n"


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()
