"""Keys: what names a run of tokens in one model space for one tenant.

``prefix key = SHA-256(tag ‖ space ‖ salt ‖ parent ‖ token ids)`` names *these tokens after exactly that prefix*;
``chunk key`` leaves the parent out and names the tokens wherever they stand. Token ids go in as little-endian int32.
All fields before the token ids have a fixed size, so no two inputs share an encoding. A tenant's salt makes its keys
unguessable for others who do not know the tenant's secret; a hit is believed only after the token ids are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import TokenRangeError

__all__ = [
    "GIVER_BYTES",
    "KEY_BYTES",
    "ROOT",
    "SALT_BYTES",
    "PrefixHasher",
    "as_tokens",
    "chunk_key",
    "chunk_keys",
    "common_prefix",
    "giver_id",
    "prefix_key",
    "prefix_keys",
    "tenant_salt",
]

KEY_BYTES = 32
SALT_BYTES = 16
GIVER_BYTES = 8

#: The parent of a context's first block.
ROOT = bytes(KEY_BYTES)

# Tag (16) + space (32) + salt (16) fill one SHA-256 block exactly, so a copied hasher saves its compression per key.
_PREFIX_TAG = b"ctxreuse/prefix1"
_CHUNK_TAG = b"ctxreuse/chunk/1"

Tokens = npt.NDArray[np.int32]


def as_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """Token ids as a contiguous little-endian int32 array [n].

    Raises TokenRangeError for an id below 0 or above 2^31 - 1 and for what is no flat list of whole numbers.
    """
    try:
        wide = np.asarray(tokens)
    except ValueError as error:  # lists of different lengths in a list
        raise TokenRangeError(f"token ids must be a flat list of whole numbers: {error}") from None
    if wide.size == 0:
        return np.zeros(0, "<i4")
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise TokenRangeError(f"token ids must be a flat list of whole numbers, not {wide.dtype} of shape {wide.shape}")
    if int(wide.min()) < 0 or int(wide.max()) > 0x7FFFFFFF:
        raise TokenRangeError(f"token id {int(wide.min() if wide.min() < 0 else wide.max())} is outside 0..2^31-1")
    return np.ascontiguousarray(wide, dtype="<i4")


@lru_cache(1024)
def tenant_salt(tenant: str, secret: bytes = b"") -> bytes:
    """Return the 16-byte salt of a tenant. Without a ``secret`` tenants are apart but their keys can be guessed."""
    # The secret's length stands first, so no pair of secret and tenant has the encoding of another pair.
    return hashlib.sha256(b"ctxreuse/tenant\0%d\0" % len(secret) + secret + tenant.encode()).digest()[:SALT_BYTES]


def _base(tag: bytes, space: bytes, salt: bytes) -> hashlib._Hash:
    if len(space) != 32 or len(salt) != SALT_BYTES:
        raise ValueError(f"space digest has {len(space)} bytes (need 32), salt {len(salt)} (need {SALT_BYTES})")
    return hashlib.sha256(tag + space + salt)


def prefix_key(space: bytes, salt: bytes, parent: bytes, tokens: Tokens) -> bytes:
    """Return the key of one run of tokens after ``parent`` (ROOT for the first); 32 bytes."""
    base = _base(_PREFIX_TAG, space, salt)
    base.update(parent)
    base.update(tokens.tobytes())
    return base.digest()


def prefix_keys(space: bytes, salt: bytes, tokens: Tokens, block_tokens: int, parent: bytes = ROOT) -> list[bytes]:
    """Return the keys of all whole blocks of ``tokens``, chained from ``parent``; a tail shorter than a block has none.

    About 0.6 µs a block of 64 tokens (``python -m benchmarks tree``).
    """
    return PrefixHasher(space, salt, block_tokens).keys(np.ascontiguousarray(tokens, "<i4").tobytes(), parent)


class PrefixHasher:
    """Makes the prefix keys of one model space for one tenant, from token ids as little-endian int32 bytes.

    Args:
        space, salt: digest of the model space, salt of the tenant.
        block_tokens: of a block.
    """

    def __init__(self, space: bytes, salt: bytes, block_tokens: int) -> None:
        self._fresh = _base(_PREFIX_TAG, space, salt).copy
        #: Bytes of a block.
        self.block_bytes = 4 * block_tokens

    def key(self, block: bytes, parent: bytes) -> bytes:
        """Return the key of one whole block behind ``parent``."""
        state = self._fresh()
        state.update(parent + block)
        return state.digest()

    def keys(self, raw: bytes, parent: bytes = ROOT) -> list[bytes]:
        """Return the keys of all whole blocks, chained from ``parent``."""
        view, step, keys = memoryview(raw), self.block_bytes, list[bytes]()
        for start in range(0, len(raw) - step + 1, step):
            state = self._fresh()
            state.update(parent)
            state.update(view[start : start + step])
            parent = state.digest()
            keys.append(parent)
        return keys

    def partial_keys(self, raw: bytes, parent: bytes, least: int) -> list[bytes]:
        """Return the keys after ``parent`` of the first ``least`` tokens of ``raw``, of one more, and so on to all."""
        state, keys = self._fresh(), list[bytes]()
        state.update(parent)
        start = 0
        for end in range(4 * least, len(raw) + 1, 4):
            state.update(raw[start:end])
            keys.append(state.copy().digest())
            start = end
        return keys


def chunk_key(space: bytes, salt: bytes, tokens: Tokens) -> bytes:
    """Return the key of a run of tokens wherever it stands; 32 bytes."""
    base = _base(_CHUNK_TAG, space, salt)
    base.update(tokens.tobytes())
    return base.digest()


def chunk_keys(space: bytes, salt: bytes, tokens: Tokens, spans: Iterable[tuple[int, int]]) -> list[bytes]:
    """As `chunk_key` for the runs from start to end that ``spans`` names; about 0.7 µs each."""
    fresh = _base(_CHUNK_TAG, space, salt).copy
    raw = memoryview(np.ascontiguousarray(tokens, "<i4").tobytes())
    keys = []
    for start, end in spans:
        state = fresh()
        state.update(raw[4 * start : 4 * end])
        keys.append(state.digest())
    return keys


def common_prefix(one: Tokens, two: Tokens) -> int:
    """Return how many leading ids are equal."""
    n = min(len(one), len(two))
    # In steps: most pairs of prompts differ soon.
    for start in range(0, n, 4096):
        differ = np.flatnonzero(one[start : min(start + 4096, n)] != two[start : min(start + 4096, n)])
        if len(differ):
            return start + int(differ[0])
    return n


def giver_id(who: bytes) -> bytes:
    """Name a peer in the record of a block that it gave: `GIVER_BYTES` of the digest of its public key, or its name."""
    return hashlib.sha256(who).digest()[:GIVER_BYTES]
