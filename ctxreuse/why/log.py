"""A log of the last requests: what each requested and why it missed; bounded, kept over restarts, cheap to write."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from ctxreuse.block.levels import limit_name
from ctxreuse.identity.keys import Tokens, common_prefix
from ctxreuse.identity.model import ModelSpace
from ctxreuse.recent import keep_newest
from ctxreuse.store.journal import Journal, read_journal
from ctxreuse.store.removals import SHORT_KEY
from ctxreuse.store.types import Removal
from ctxreuse.why.misses import REFINED, miss_spans, removal_reason, shared_blocks
from ctxreuse.why.records import (
    DraftOutcome,
    ExitOutcome,
    LoggedEntry,
    LogHead,
    MissSpan,
    RequestInfo,
    VerifiedOutcome,
    decoded,
    encoded,
)

if TYPE_CHECKING:
    from ctxreuse.usage import Usage

__all__ = ["FILE", "OpenRequest", "RequestLog", "read_requests"]

#: In the store's folder.
FILE = "requests.journal"

_LIMIT = 16 << 20
_SEEN = 1 << 16
_MARKS = 4096


class LoggedRequest(Protocol):
    """The part of a `ctxreuse.runtime.Request` that is logged."""

    @property
    def ids(self) -> Tokens: ...
    @property
    def keys(self) -> Sequence[bytes]: ...
    @property
    def max_kl(self) -> float | None: ...
    @property
    def about(self) -> RequestInfo: ...


class OpenRequest:
    """A logged request whose context is still in use; the log forgets that it runs when this object goes.

    Attributes:
        entry: what is logged; its reasons may change until `RequestLog.kept`.
        shared: leading blocks that another request was computing at the same time.
    """

    __slots__ = ("__weakref__", "entry", "shared")

    def __init__(self, entry: LoggedEntry) -> None:
        self.entry, self.shared = entry, 0


class RequestLog:
    """The last requests: what each requested and why it missed. Any thread may call.

    Args:
        file: where it is kept over restarts (None: nowhere); `open` must be called then.
        texts: keep the token ids too, so that explanations can show words; otherwise only hashes are kept.
        most, limit: how many requests, and bytes of them.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        file: Path | None = None,
        *,
        texts: bool = True,
        most: int = 1024,
        limit: int = _LIMIT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.texts, self._most, self._limit, self._clock = texts, most, limit, clock
        self._lock = threading.RLock()
        self._entries: deque[LoggedEntry] = deque()
        self._sizes: dict[int, int] = {}
        self._nbytes = 0
        self._secret = os.urandom(16)
        self._spaces: dict[bytes, ModelSpace] = {}
        self._seen: dict[bytes, float] = {}
        self._marks: OrderedDict[tuple[bytes, bytes], set[bytes]] = OrderedDict()
        #: By the first block that is being computed.
        self._running: dict[bytes, weakref.ref[OpenRequest]] = {}
        self._open: weakref.WeakSet[OpenRequest] = weakref.WeakSet()
        self._removal: Callable[[bytes], Removal | None] = _unknown
        self._journal = Journal(file, limit, lambda: [encoded(self._head())]) if file is not None else None

    def open(self) -> RequestLog:
        """Read the file and append to it from now on; a damaged one is set aside. Texts are removed from it if they are
        not to be kept."""
        if self._journal is not None:
            path = self._journal.path
            with self._lock:
                self._journal.open(lambda raw: self._recall(decoded(raw, path)))
                if not self.texts:
                    self.forget_texts()
                # The spaces of earlier runs are in the older half, which will go.
                self._journal.append(encoded(self._head()))
        return self

    # Writing

    def note(
        self,
        request: LoggedRequest,
        usage: Usage,
        computed: Sequence[MissSpan],
        *,
        space: ModelSpace,
        salt: bytes,
        removal: Callable[[bytes], Removal | None],
    ) -> OpenRequest:
        """Log a prompt that was just computed; `kept` follows when its context is released.

        ``computed``: its spans that were not reused, ascending; ``removal``: see `RemovalLog.removal`. About 15 µs at
        2,000 tokens and 80 µs at 32,000.
        """
        info, ids, size = request.about, request.ids, space.block_tokens
        last = (len(ids) - 1) // size
        first = next((c.start // size for c in computed if c.start // size < min(last, c.end // size)), -1)
        tenant = self.tenant(salt)
        first_block = self._hash(ids[:size].tobytes()) if len(ids) >= size else b""
        message = info.first_message[: 1 << 14].encode("utf-8", "surrogatepass")
        first_message = self._hash(message) if message else b""
        with self._lock:
            marks = tenant, space.digest, first_block, first_message
            why = self._reason(request.keys, first, usage.miss_reason, removal, marks)
            entry = LoggedEntry(
                info.request or f"req-{os.urandom(12).hex()}", info.client_id, info.session, self._clock(), tenant,
                space.digest, size, len(ids), usage.cached_tokens, usage.tokens.by_source, why,
                limit_name(request.max_kl) or None, info.parts,
                tuple(span for span in computed if span.end > span.start), first_block, first_message,
                relocated=usage.tokens.relocated, recomputed=usage.tokens.recomputed,
                gate_decision=usage.gate_decision, reordered=info.reordered,
            )  # fmt: skip
            entry.keys = b"".join([key[:SHORT_KEY] for key in request.keys])
            if self.texts:
                entry.ids = ids.tobytes()
            if space.digest not in self._spaces:
                self._add_space(space)
            self._add(entry)
            self._removal = removal
            opened = OpenRequest(entry)
            if first >= 0:
                key = entry.keys[first * SHORT_KEY : (first + 1) * SHORT_KEY]
                other = self._running.get(key, _nothing)()
                if why == "running" and other is not None:
                    opened.shared = shared_blocks(entry, other.entry)
                self._running[key] = weakref.ref(opened)
                while len(self._running) > 64:
                    del self._running[next(iter(self._running))]
            self._open.add(opened)
        return opened

    def _reason(
        self,
        keys: Sequence[bytes],
        first: int,
        missed: str,
        removal: Callable[[bytes], Removal | None],
        marks: tuple[bytes, bytes, bytes, bytes],
    ) -> str:
        if first < 0:
            return ""
        key = keys[first][:SHORT_KEY]
        if missed and missed not in REFINED:
            return missed
        left = removal(key) if missed != "no store" else None
        if left is not None:
            return removal_reason(left)
        if key in self._seen:
            return missed if missed == "no store" else "lost"
        if self._running.get(key, _nothing)() is not None:
            return "running"
        tenant, space, *names = marks
        # Only of the same tenant: a reason must not reveal others' requests.
        if not first and any(self._marks.get((tenant, name), set()) - {space} for name in names if name):
            return "space"
        return "new"

    def drafted(self, opened: OpenRequest, outcome: DraftOutcome) -> None:
        """Add what the drafts of one of a request's answers came to; written down with `kept`."""
        with self._lock:
            before = opened.entry.drafts
            opened.entry.drafts = outcome if before is None else before + outcome

    def verified(self, opened: OpenRequest, outcome: VerifiedOutcome) -> None:
        """Add what another node decoded of a request's answer; written down with `kept`."""
        with self._lock:
            opened.entry.verified = outcome

    def exited(self, opened: OpenRequest, outcome: ExitOutcome) -> None:
        """Add what became of the early exits of one of a request's answers; written down with `kept`."""
        with self._lock:
            before = opened.entry.exits
            opened.entry.exits = outcome if before is None else before + outcome

    def kept(self, opened: OpenRequest, tokens: Tokens, keys: Sequence[bytes]) -> None:
        """Note that a logged context was offered to the store: its ``tokens``, answer included, and the ``keys``."""
        with self._lock:
            if opened not in self._open:
                return
            self._open.discard(opened)
            entry = opened.entry
            entry.keys = b"".join([key[:SHORT_KEY] for key in keys])
            if entry.ids:
                entry.ids = tokens.tobytes()
            self._settle(entry, opened.shared)

    def _settle(self, entry: LoggedEntry, shared: int = 0) -> None:
        """Find out why it missed while the store still remembers; then let other requests be compared with it."""
        running = {key: (one, one()) for key, one in self._running.items()}
        self._running = {k: ref for k, (ref, one) in running.items() if one is not None and one.entry is not entry}
        entry.misses = miss_spans(entry, self._removal, self._seen, shared)
        if id(entry) in self._sizes:
            self._nbytes += entry.nbytes - self._sizes[id(entry)]
            self._sizes[id(entry)] = entry.nbytes
            self._trim()
        self._index(entry)
        if self._journal is not None:
            self._journal.append(encoded(entry))

    def _index(self, entry: LoggedEntry) -> None:
        keys = [entry.keys[i : i + SHORT_KEY] for i in range(0, len(entry.keys), SHORT_KEY)]
        for key in reversed(keys):
            if key in self._seen:
                break  # and so are those before it
            self._seen[key] = entry.at
        self._seen = keep_newest(self._seen, _SEEN)
        for name in (entry.first_block, entry.first_message):
            if name:
                self._marks.setdefault((entry.tenant, name), set()).add(entry.space)
                self._marks.move_to_end((entry.tenant, name))
        while len(self._marks) > _MARKS:
            self._marks.popitem(last=False)

    def forget(self, ids: Tokens) -> int:
        """Forget the requests that begin with ``ids``, on disk too; returns how many."""
        with self._lock:
            kept = [e for e in self._entries if not e.ids or common_prefix(e.numbers, ids) < len(ids)]
            return self._keep(kept)

    def drop(self, requests: Collection[str]) -> int:
        """Forget the requests of these ids."""
        names = frozenset(requests)
        with self._lock:
            return self._keep([entry for entry in self._entries if entry.request not in names])

    def forget_session(self, session: str) -> int:
        """Forget all requests of a session."""
        with self._lock:
            return self._keep([entry for entry in self._entries if entry.session != session])

    def forget_texts(self) -> None:
        """Forget the token ids of all requests; their hashes stay."""
        with self._lock:
            if any(entry.ids for entry in self._entries):
                for entry in self._entries:
                    entry.ids = b""
                self._keep(self._entries, rewrite=True)

    def _keep(self, kept: Iterable[LoggedEntry], *, rewrite: bool = False) -> int:
        before, self._entries = len(self._entries), deque(kept)
        self._sizes = {id(entry): entry.nbytes for entry in self._entries}
        self._nbytes = sum(self._sizes.values())
        # What still runs must not be written when it ends.
        self._open = weakref.WeakSet(one for one in self._open if id(one.entry) in self._sizes)
        if (rewrite or before != len(self._entries)) and self._journal is not None:
            self._journal.rewrite([encoded(entry) for entry in self._entries])
        return before - len(self._entries)

    # Reading

    def get(self, request: str, tenant: bytes | None = None) -> LoggedEntry | None:
        """Return the newest request of that id or client id, of a tenant (None: any); None if it is not known."""
        return self._newest(tenant, lambda entry: entry.named(request))

    def last(self, session: str = "", tenant: bytes | None = None) -> LoggedEntry | None:
        """Return the newest request, of a session if one is named."""
        return self._newest(tenant, lambda entry: not session or entry.session == session)

    def _newest(self, tenant: bytes | None, fits: Callable[[LoggedEntry], bool]) -> LoggedEntry | None:
        with self._lock:
            found = (entry for entry in reversed(self._entries) if tenant in (None, entry.tenant) and fits(entry))
            return next(found, None)

    def tenant(self, salt: bytes) -> bytes:
        """Return the hash that stands for the tenant of a salt in entries."""
        return self._hash(salt)

    def entries(self) -> list[LoggedEntry]:
        """Return all requests, oldest first."""
        with self._lock:
            return list(self._entries)

    def space(self, digest: bytes) -> ModelSpace | None:
        """Return the model space of that digest, if it computed one of them."""
        return self._spaces.get(digest)

    def settled(self, entry: LoggedEntry) -> LoggedEntry:
        """Return the entry with reasons for all its misses, also while its answer is being generated."""
        with self._lock:
            if all(miss.reason for miss in entry.misses):
                return entry
            shared = next((one.shared for one in self._open if one.entry is entry), 0)
            return msgspec.structs.replace(entry, misses=miss_spans(entry, self._removal, self._seen, shared))

    def missed_tokens(self, request: str) -> dict[str, int]:
        """Return the tokens of a request that fill blocks and were computed nevertheless, by reason."""
        entry = self.get(request)
        found: dict[str, int] = {}
        for miss in entry.misses if entry is not None else ():
            if miss.reason and miss.reason != "tail":
                found[miss.reason] = found.get(miss.reason, 0) + miss.end - miss.start
        return found

    def __len__(self) -> int:
        return len(self._entries)

    # Memory and disk

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=SHORT_KEY, key=self._secret).digest()

    def _head(self) -> LogHead:
        return LogHead(self._secret, tuple(self._spaces.values()))

    def _add_space(self, space: ModelSpace) -> None:
        self._spaces[space.digest] = space
        while len(self._spaces) > 64:
            del self._spaces[next(iter(self._spaces))]
        if self._journal is not None:
            self._journal.append(encoded(self._head()))

    def _add(self, entry: LoggedEntry) -> None:
        self._entries.append(entry)
        self._sizes[id(entry)] = entry.nbytes
        self._nbytes += entry.nbytes
        self._trim()

    def _trim(self) -> None:
        while len(self._entries) > self._most or (self._nbytes > self._limit and len(self._entries) > 1):
            self._nbytes -= self._sizes.pop(id(self._entries.popleft()))

    def _recall(self, record: LoggedEntry | LogHead) -> None:
        if isinstance(record, LoggedEntry):
            self._add(record)
            self._index(record)
        else:
            self._secret = record.secret
            self._spaces |= {space.digest: space for space in record.spaces[:64]}

    def check(self) -> None:
        """Raise AssertionError where bounds or counts are wrong."""
        with self._lock:
            assert self._nbytes == sum(entry.nbytes for entry in self._entries), "miscounted bytes"
            assert len(self._entries) <= self._most, "too many requests"
            assert self._nbytes <= self._limit or len(self._entries) == 1, "too many bytes"
            assert len(self._seen) <= _SEEN, "too many keys"
            assert len(self._marks) <= _MARKS, "too many marks"

    def close(self) -> None:
        """Write open requests as they are, and stop writing. Idempotent."""
        with self._lock:
            if self._journal is not None:
                for entry in list(self._entries):
                    if any(not miss.reason for miss in entry.misses):
                        self._settle(entry)
                self._open.clear()
                self._journal.close()


def _nothing() -> None:
    return None


def _unknown(_: bytes) -> Removal | None:
    return None


def read_requests(folder: Path) -> RequestLog:
    """Return the log in a store's folder, for reading beside its owner. Raises FormatError."""
    book, path = RequestLog(), folder / FILE
    for raw in read_journal(path, _LIMIT):
        book._recall(decoded(raw, path))
    return book
