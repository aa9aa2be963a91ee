"""Explains cache misses of backends: compares each request with earlier ones of its tenant, by hashes only.

The proxy sees messages, not tokens, and the usage that a backend reports. Of each request it keeps a chain of keyed
hashes, one per 256 bytes of its messages, and no text. The key has a secret of the node and the tenant's name, so that
no text can be searched for and no two tenants have a hash in common.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import xxhash

from ctxreuse.errors import FormatError
from ctxreuse.recent import keep_newest
from ctxreuse.store.journal import Journal
from ctxreuse.why import PromptPart

__all__ = ["FILE", "CloudWhy", "ProxyRequestLog"]

log = logging.getLogger(__name__)

#: In the folder of the cloud's store.
FILE = "asked.journal"

_UNIT, _SHORT = 256, 8
#: Bytes of which the hashes are kept for requests that begin alike.
_SPAN = 4096
_MAX, _LIMIT = 2048, 16 << 20
#: Bytes of a request that are hashed, after its answer has ended: 0.04 ms for 8 KB, 1.2 ms for these.
_MAX_HASHED = 256 << 10
# A backend reuses whole blocks and counts tokens where we count bytes: only more than this share is a miss.
_SLACK = 0.1

_ADVICE = {
    "routed": "Send requests that belong together with one prompt_cache_key: they go to one backend.",
    "backend": "Give the backend a larger prefix cache, and make it report cached_tokens.",
    "new": "Move what changes behind what stays the same: dates, ids and counters to the end, or the last message.",
}


class Seen(msgspec.Struct, array_like=True, frozen=True):
    """One answered request; its ``parts`` end at bytes of the request. ``route``: why it went where it did."""

    request: str
    at: float
    tenant: bytes
    model: str
    backend: str
    prompt_tokens: int
    cached_tokens: int
    nbytes: int
    parts: tuple[PromptPart, ...]
    keys: bytes
    route: str = ""


class CloudWhy(msgspec.Struct, frozen=True):
    """Why a request missed the cache.

    ``reason``: "" (no miss); ``new``: it differs from all earlier requests in message ``part`` (from 1; ``name``: its
    role) within 256 bytes behind ``byte``; ``routed``: the ``nearest`` earlier request went to another backend;
    ``backend``: the same backend did not reuse what it had computed. ``shared``: share of this request's bytes that
    the nearest began with.
    """

    request: str
    at: float
    model: str
    backend: str
    prompt_tokens: int
    cached_tokens: int
    reason: str
    nearest: str = ""
    shared: float = 0.0
    part: int = 0
    name: str = ""
    byte: int = 0
    text: str = ""
    advice: str = ""


class ProxyRequestLog:
    """The last 2,048 answered requests; for one event loop. ``file``: journal that keeps them over restarts."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._secret = clock, os.urandom(32)
        self._seen: deque[Seen] = deque(maxlen=_MAX)
        self._spans: dict[bytes, bytes] = {}
        self._seed = int.from_bytes(os.urandom(8), "little")
        self._journal = Journal(file, _LIMIT, lambda: [self._secret]) if file is not None else None
        if self._journal is not None:
            self._journal.open(self._recall)
            self._journal.append(self._secret)

    def note(
        self,
        request: str,
        tenant: str,
        model: str,
        backend: str,
        tokens: tuple[int, int],
        parts: Sequence[tuple[str, bytes]],
        route: str = "",
    ) -> None:
        """Note an answered request. ``tokens``: prompt and cached tokens as reported (0: not reported); ``parts``: see
        `ProxyRequest.messages`; ``route``: see `describe`."""
        if not parts:
            return
        ends, body = [], b""
        for name, raw in parts:
            body += raw[: max(0, _MAX_HASHED - len(body))]
            ends.append(PromptPart(name[:64], len(body)))
        owner = self._owner(tenant)
        secret, keys = self._secret + owner, []
        parent = hashlib.blake2b(model.encode("utf-8", "surrogatepass"), digest_size=_SHORT, key=secret).digest()
        for at in range(0, len(body) - _UNIT + 1, _SPAN):
            keys.append(self._keys(parent, body[at : at + _SPAN]))
            parent = keys[-1][-_SHORT:]
        seen = Seen(
            request, self._clock(), owner, model[:200], backend, *tokens, len(body), tuple(ends), b"".join(keys), route
        )  # fmt: skip
        self._seen.append(seen)
        if self._journal is not None:
            self._journal.append(msgspec.msgpack.encode(seen))

    def _keys(self, parent: bytes, span: bytes) -> bytes:
        """Return the keys of all whole units of a span; requests begin with spans that others had before."""
        name = xxhash.xxh3_128_digest(parent + span, self._seed)
        keys = self._spans.get(name)
        if keys is None:
            keys = b""
            for at in range(0, len(span) - _UNIT + 1, _UNIT):
                # The first parent is secret.
                parent = hashlib.blake2b(parent + span[at : at + _UNIT], digest_size=_SHORT).digest()
                keys += parent
            if len(span) == _SPAN:
                self._spans[name] = keys
                self._spans = keep_newest(self._spans, _MAX)
        return keys

    def newest(self, most: int) -> list[Seen]:
        """Return the last requests, oldest first. Any thread."""
        return list(self._seen)[-most:]

    def backend(self, request: str, tenant: str) -> str:
        """Return the backend that answered a tenant's request last; empty if none is known."""
        owner = self._owner(tenant)
        rows = (seen for seen in reversed(self._seen) if (seen.request, seen.tenant) == (request, owner))
        return next((seen.backend for seen in rows), "")

    def explain(self, request: str, tenant: str | None) -> CloudWhy | None:
        """Explain a request; None if it is not known or not of ``tenant`` (None: the operator, who may see all)."""
        owner = None if tenant is None else self._owner(tenant)
        mine = [seen for seen in self._seen if owner in (None, seen.tenant)]
        at = next((i for i in reversed(range(len(mine))) if mine[i].request == request), None)
        if at is None:
            return None
        here = mine[at]
        before = [seen for seen in mine[:at] if seen.tenant == here.tenant and seen.model == here.model]
        nearest = max(
            before, key=lambda seen: (_shared(here, seen), seen.backend == here.backend, seen.at), default=None
        )
        return _explained(here, nearest)

    def _owner(self, tenant: str) -> bytes:
        return hashlib.blake2b(tenant.encode(), digest_size=_SHORT, key=self._secret).digest()

    def _recall(self, raw: bytes) -> None:
        if len(raw) == 32:
            self._secret = raw
            return
        try:
            seen = msgspec.msgpack.decode(raw, type=Seen)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"not a record of a request: {error}") from None
        if len(seen.keys) % _SHORT or not seen.parts or seen.nbytes < len(seen.keys) // _SHORT * _UNIT:
            raise FormatError("not a record of a request: wrong number of hashes")
        self._seen.append(seen)

    def close(self) -> None:
        """Stop writing. Idempotent."""
        if self._journal is not None:
            self._journal.close()


def _shared(one: Seen, two: Seen) -> int:
    """Return the number of equal leading keys, by bisection: each key covers all bytes before it."""
    low, high = 0, min(len(one.keys), len(two.keys)) // _SHORT
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * _SHORT, middle * _SHORT)
        low, high = (middle, high) if one.keys[at] == two.keys[at] else (low, middle - 1)
    return low


def _explained(here: Seen, nearest: Seen | None) -> CloudWhy:
    shared = _shared(here, nearest) * _UNIT if nearest is not None else 0
    share = shared / here.nbytes if here.nbytes else 0.0
    reused = here.cached_tokens / here.prompt_tokens if here.prompt_tokens else 1.0
    start, number = 0, 1
    while number < len(here.parts) and shared >= here.parts[number - 1].end:
        start, number = here.parts[number - 1].end, number + 1
    name, byte = here.parts[number - 1].name, max(0, shared - start)
    reason, text = "", f"{here.backend} reused {here.cached_tokens:,} of {here.prompt_tokens:,} prompt tokens. "
    if not here.prompt_tokens:
        text = f"{here.backend} did not report what it reused (stream_options.include_usage). "
    if nearest is None:
        reason = "new"
        text += "No earlier request for this model is known."
    elif share > reused + _SLACK:
        reason = "routed" if nearest.backend != here.backend else "backend"
        text += f"{share:.0%} of its bytes are those of {nearest.request}, which "
        text += f"{nearest.backend} answered" if reason == "routed" else "it answered too, and no longer had cached"
        text += "."
    elif here.nbytes - shared >= _UNIT:
        reason = "new"
        text += f"It differs from the nearest earlier request, {nearest.request}, first in message {number}, {name}, "
        text += f"within {_UNIT} bytes after byte {byte:,} of it."
    else:
        text += f"It begins like {nearest.request}."
    if here.route:
        text += f" {here.route}"
    ends = nearest is None or (reason == "new" and number == len(here.parts))
    return CloudWhy(
        here.request, here.at, here.model, here.backend, here.prompt_tokens, here.cached_tokens, reason,
        nearest.request if nearest is not None else "", share, number, name, byte, text,
        "" if ends else _ADVICE.get(reason, ""),
    )  # fmt: skip
