"""The requests of late: what each asked for and what it lacked, bounded, kept over restarts, cheap to write."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ctxreuse.keys import Tokens
from ctxreuse.model import ModelSpace
from ctxreuse.store.gone import SHORT, Gone
from ctxreuse.store.journal import Journal, read_journal
from ctxreuse.why.difference import common_prefix
from ctxreuse.why.lacking import REFINED, lacks_of, shared_blocks
from ctxreuse.why.records import About, Entry, Head, Lack, decoded, encoded

if TYPE_CHECKING:
    from ctxreuse.metrics import Spent

__all__ = ["FILE", "RequestBook", "read_requests"]

#: In the store's folder.
FILE = "requests.journal"

_LIMIT = 16 << 20
_SEEN = 1 << 16
_MARKS = 4096


class Computed(Protocol):
    """Tokens of a prompt that were computed; ``reason``: why, if that is known already, else ""."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def reason(self) -> str: ...


class RequestBook:
    """The last ``most`` requests, or as many as fit in ``limit`` bytes. Any thread may call.

    ``file``: where they are kept over restarts (None: nowhere); `open` must be called then. ``texts``: keep the token
    ids too, so that words can be shown; without them there are only hashes. ``clock``: seconds since 1970.
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
        self._entries: deque[Entry] = deque()
        self._sizes: dict[int, int] = {}
        self._nbytes = 0
        self._secret = os.urandom(16)
        self._spaces: dict[bytes, ModelSpace] = {}
        self._seen: dict[bytes, float] = {}
        self._marks: OrderedDict[tuple[bytes, bytes], set[bytes]] = OrderedDict()
        self._making: dict[bytes, tuple[weakref.ref[Any], Entry]] = {}
        self._open: weakref.WeakKeyDictionary[Any, tuple[Entry, int]] = weakref.WeakKeyDictionary()
        self._gone: Callable[[bytes], Gone | None] = _unknown
        self._journal = Journal(file, limit, lambda: [encoded(self._head())]) if file is not None else None

    def open(self) -> RequestBook:
        """Read what is kept, and go on writing it; a file that is damaged is set aside. Texts that were kept and shall
        not be any more are removed from it."""
        if self._journal is not None:
            path = self._journal.path
            with self._lock:
                self._journal.open(lambda raw: self._recall(decoded(raw, path)))
                if not self.texts:
                    self.forget_texts()
                # The spaces of before are in the older half, which will go.
                self._journal.append(encoded(self._head()))
        return self

    # Writing

    def note(
        self,
        about: About | None,
        ids: Tokens,
        keys: Sequence[bytes],
        usage: Spent,
        computed: Sequence[Computed],
        *,
        space: ModelSpace,
        salt: bytes,
        lossy: str | None,
        live: object | None,
        gone: Callable[[bytes], Gone | None],
    ) -> tuple[str, str]:
        """A prompt was computed just now; returns the request's id and why its first missing block was missing.

        ``keys``: of its whole blocks; ``computed``: runs of tokens that were not reused, ascending; ``live``: what
        `kept` will be called with; ``gone``: see `GoneBook.gone`. Takes some 15 µs at 2,000 tokens and 80 µs at 32,000.
        """
        said, size, now = about or About(), space.block_tokens, self._clock()
        name = said.request or f"req-{os.urandom(12).hex()}"
        last = (len(ids) - 1) // size
        first = next((c.start // size for c in computed if c.start // size < min(last, c.end // size)), -1)
        tenant = self.tenant(salt)
        mark = self._hash(ids[:size].tobytes()) if len(ids) >= size else b""
        opening = self._hash(said.opening[: 1 << 14].encode("utf-8", "surrogatepass")) if said.opening else b""
        with self._lock:
            why = self._reason(keys, first, usage.missed, gone, (tenant, space.digest, mark, opening))
            entry = Entry(
                name, said.alias, said.session, now, tenant, space.digest, size, len(ids), usage.cached_tokens,
                usage.by_source, why, lossy, said.parts,
                tuple(Lack(c.start, c.end, c.reason) for c in computed if c.end > c.start), mark, opening,
                moved=usage.moved, mended=usage.mended, gate=usage.gate,
            )  # fmt: skip
            entry.keys = b"".join([key[:SHORT] for key in keys])
            if self.texts:
                entry.ids = ids.tobytes()
            if space.digest not in self._spaces:
                self._meet(space)
            self._hold(entry)
            self._gone = gone
            if live is not None:
                self._open[live] = entry, self._beside(entry, first)
                if first >= 0:
                    self._making[entry.keys[first * SHORT : (first + 1) * SHORT]] = weakref.ref(live), entry
                    while len(self._making) > 64:
                        del self._making[next(iter(self._making))]
            else:
                self._settle(entry, 0)
        return name, why

    def _beside(self, entry: Entry, first: int) -> int:
        """Leading blocks that a request under way has in common with one that misses its block ``first``."""
        if entry.why != "running":
            return 0
        return shared_blocks(entry, self._making[entry.keys[first * SHORT : (first + 1) * SHORT]][1])

    def _reason(
        self,
        keys: Sequence[bytes],
        first: int,
        missed: str,
        gone: Callable[[bytes], Gone | None],
        marks: tuple[bytes, bytes, bytes, bytes],
    ) -> str:
        if first < 0:
            return ""
        key = keys[first][:SHORT]
        if missed and missed not in REFINED:
            return missed
        left = gone(key) if missed != "no store" else None
        if left is not None:
            return left.how
        if key in self._seen:
            return missed if missed == "no store" else "lost"
        making = self._making.get(key)
        if making is not None and making[0]() is not None:
            return "running"
        tenant, space, *names = marks
        # Only of the same tenant: nobody shall learn from a word what others asked.
        if not first and any(self._marks.get((tenant, name), set()) - {space} for name in names if name):
            return "space"
        return "new"

    def kept(self, live: object, tokens: Tokens, keys: Sequence[bytes]) -> None:
        """A context that was noted is finished, and was offered to the store: its ``tokens``, answer included."""
        with self._lock:
            entry, beside = self._open.pop(live, (None, 0))
            if entry is None:
                return
            entry.keys = b"".join([key[:SHORT] for key in keys])
            if entry.ids:
                entry.ids = tokens.tobytes()
            self._settle(entry, beside)

    def _settle(self, entry: Entry, beside: int) -> None:
        """Find out what it lacked and why, while the store still remembers; then let others find it."""
        self._making = {key: made for key, made in self._making.items() if made[1] is not entry}
        entry.lacks = lacks_of(entry, self._gone, self._seen, beside)
        if id(entry) in self._sizes:
            self._nbytes += entry.nbytes - self._sizes[id(entry)]
            self._sizes[id(entry)] = entry.nbytes
            self._trim()
        self._index(entry)
        if self._journal is not None:
            self._journal.append(encoded(entry))

    def _index(self, entry: Entry) -> None:
        keys = [entry.keys[i : i + SHORT] for i in range(0, len(entry.keys), SHORT)]
        for key in reversed(keys):
            if key in self._seen:
                break  # and so are those before it
            self._seen[key] = entry.at
        while len(self._seen) > _SEEN:
            del self._seen[next(iter(self._seen))]
        for name in (entry.mark, entry.opening):
            if name:
                self._marks.setdefault((entry.tenant, name), set()).add(entry.space)
                self._marks.move_to_end((entry.tenant, name))
        while len(self._marks) > _MARKS:
            self._marks.popitem(last=False)

    def forget(self, ids: Tokens) -> int:
        """Let go of the requests that begin with ``ids``, on disk too; returns how many these were."""
        with self._lock:
            kept = [e for e in self._entries if not e.ids or common_prefix(e.numbers, ids) < len(ids)]
            return self._keep(kept)

    def forget_session(self, session: str) -> int:
        """The same for all requests of a session."""
        with self._lock:
            return self._keep([entry for entry in self._entries if entry.session != session])

    def forget_texts(self) -> None:
        """Let go of the ids of all requests; their hashes stay."""
        with self._lock:
            if any(entry.ids for entry in self._entries):
                for entry in self._entries:
                    entry.ids = b""
                self._keep(self._entries, anew=True)

    def _keep(self, kept: Iterable[Entry], *, anew: bool = False) -> int:
        before, self._entries = len(self._entries), deque(kept)
        self._sizes = {id(entry): entry.nbytes for entry in self._entries}
        self._nbytes = sum(self._sizes.values())
        if (anew or before != len(self._entries)) and self._journal is not None:
            self._journal.rewrite([encoded(entry) for entry in self._entries])
        return before - len(self._entries)

    # Reading

    def get(self, request: str, tenant: bytes | None = None) -> Entry | None:
        """The newest request of that id or alias, of a tenant (None: any); None if it is not known (any more)."""
        return self._newest(tenant, lambda entry: entry.named(request))

    def last(self, session: str = "", tenant: bytes | None = None) -> Entry | None:
        """The newest request, of a session if one is named."""
        return self._newest(tenant, lambda entry: not session or entry.session == session)

    def _newest(self, tenant: bytes | None, fits: Callable[[Entry], bool]) -> Entry | None:
        with self._lock:
            found = (entry for entry in reversed(self._entries) if tenant in (None, entry.tenant) and fits(entry))
            return next(found, None)

    def tenant(self, salt: bytes) -> bytes:
        """What the tenant of a salt is called in entries."""
        return self._hash(salt)

    def every(self) -> list[Entry]:
        """All that are known, oldest first."""
        with self._lock:
            return list(self._entries)

    def space(self, digest: bytes) -> ModelSpace | None:
        """A model space that computed one of them."""
        return self._spaces.get(digest)

    def settled(self, entry: Entry) -> Entry:
        """It as it stands, with reasons for all that it lacked, also while its answer is being made."""
        with self._lock:
            if all(lack.reason for lack in entry.lacks):
                return entry
            beside = next((blocks for held, blocks in self._open.values() if held is entry), 0)
            return msgspec.structs.replace(entry, lacks=lacks_of(entry, self._gone, self._seen, beside))

    def lacked(self, request: str) -> dict[str, int]:
        """Tokens of a request that were computed although they fill blocks, by reason."""
        entry = self.get(request)
        found: dict[str, int] = {}
        for lack in entry.lacks if entry is not None else ():
            if lack.reason and lack.reason != "tail":
                found[lack.reason] = found.get(lack.reason, 0) + lack.end - lack.start
        return found

    def __len__(self) -> int:
        return len(self._entries)

    # Memory and disk

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=SHORT, key=self._secret).digest()

    def _head(self) -> Head:
        return Head(self._secret, tuple(self._spaces.values()))

    def _meet(self, space: ModelSpace) -> None:
        self._spaces[space.digest] = space
        while len(self._spaces) > 64:
            del self._spaces[next(iter(self._spaces))]
        if self._journal is not None:
            self._journal.append(encoded(self._head()))

    def _hold(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._sizes[id(entry)] = entry.nbytes
        self._nbytes += entry.nbytes
        self._trim()

    def _trim(self) -> None:
        while len(self._entries) > self._most or (self._nbytes > self._limit and len(self._entries) > 1):
            self._nbytes -= self._sizes.pop(id(self._entries.popleft()))

    def _recall(self, record: Entry | Head) -> None:
        if isinstance(record, Entry):
            self._hold(record)
            self._index(record)
        else:
            self._secret = record.secret
            self._spaces |= {space.digest: space for space in record.spaces[:64]}

    def check(self) -> None:
        """Raises AssertionError where bounds or counts are wrong."""
        with self._lock:
            assert self._nbytes == sum(entry.nbytes for entry in self._entries), "bytes are counted wrongly"
            assert len(self._entries) <= self._most, "more requests than there may be"
            assert self._nbytes <= self._limit or len(self._entries) == 1, "more bytes than there may be"
            assert len(self._seen) <= _SEEN, "more keys than there may be"
            assert len(self._marks) <= _MARKS, "more marks than there may be"

    def close(self) -> None:
        """Write what is under way as it is, and stop writing. A second call does nothing."""
        with self._lock:
            if self._journal is not None:
                for entry in list(self._entries):
                    if any(not lack.reason for lack in entry.lacks):
                        self._settle(entry, 0)
                self._open.clear()
                self._journal.close()


def _unknown(_: bytes) -> Gone | None:
    return None


def read_requests(folder: Path) -> RequestBook:
    """What is kept in a store's folder, for reading beside its owner. Raises FormatError."""
    book, path = RequestBook(), folder / FILE
    for raw in read_journal(path, _LIMIT):
        book._recall(decoded(raw, path))
    return book
