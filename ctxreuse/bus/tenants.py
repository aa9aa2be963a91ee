"""Whose block is whose: tenants' salts, and a directory of the tenant of each held block."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ctxreuse.errors import ConfigError
from ctxreuse.keys import ROOT, prefix_key, tenant_salt
from ctxreuse.store.base import Entry, WholeStore

__all__ = ["Directory", "Line", "node_secret"]

_SECRET_BYTES = 32
#: Changes of one tenant that are remembered: more than come between two announcements (100 bytes each).
_LOG = 1 << 14
#: Hints that may wait; beyond that the store is walked anew.
_HINTS = 1 << 18


def node_secret(path: str | os.PathLike[str]) -> bytes:
    """The 32 bytes from which a node derives its tenants' salts; made in a file (0600) where there is none yet.

    Raises ConfigError if the file cannot be read or made, has another size, or may be read by others: with the secret,
    keys of any tenant can be computed.
    """
    place = Path(path)
    try:
        if not place.exists():
            _make_secret(place)
        with open(place, "rb") as opened:
            mode, secret = os.fstat(opened.fileno()).st_mode & 0o777, opened.read(_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the node's secret cannot be made or read: {error.strerror}", where=str(place)) from None
    if mode & 0o077:
        raise ConfigError("the node's secret may be read by others", where=str(place), fix=f"chmod 600 {place}")
    if len(secret) != _SECRET_BYTES:
        fix = "Restore it from a backup; without it, what peers have given is not found any more"
        raise ConfigError("this is no node's secret", where=str(place), fix=fix)
    return secret


def _make_secret(place: Path) -> None:
    """Written beside and linked, so that whoever finds the file finds all of it, and the first of two makers wins."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = place.with_name(f"{place.name}.{os.getpid()}.new")
    try:
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(file, "wb") as opened:
            opened.write(secrets.token_bytes(_SECRET_BYTES))
            opened.flush()
            os.fsync(opened.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(beside, place)
    finally:
        beside.unlink(missing_ok=True)


class Line(NamedTuple):
    """A family of contexts: all blocks above one first block belong to its tenant and model space."""

    tenant: str
    space: bytes


class _Book:
    """One tenant's keys and what changed since version ``floor``. Its versions count its own changes only: those of
    others are none of its business."""

    def __init__(self) -> None:
        self.keys: dict[bytes, None] = {}
        self.log: deque[tuple[int, bytes]] = deque()
        self.floor = self.version = 1

    def note(self, key: bytes) -> None:
        self.version += 1
        self.log.append((self.version, key))
        if len(self.log) > _LOG:
            self.floor = self.log.popleft()[0]


class Directory:
    """The tenant of each block that ``store`` holds. One thread calls all methods; the store may change in others.

    A first block belongs to the tenant with whose salt its key can be made again; what follows belongs to whom its
    parent belongs to. Blocks of nobody known are nobody's: they are neither found nor counted.
    """

    def __init__(self, store: WholeStore, secret: bytes, tenants: Iterable[str] = ()) -> None:
        self._store, self._secret = store, secret
        self._salts: dict[str, bytes] = {}
        self._lines: dict[bytes, Line] = {}
        self._books: dict[str, _Book] = {}
        self._strange: dict[bytes, None] = {}  # held, and of nobody known: their first block is, or is withheld
        self._withheld: dict[bytes, Line] = {}
        self._lock = threading.Lock()
        self._hints: set[bytes] = set()
        self._anew = True
        self._unwatch = store.watch(self._hint)
        for tenant in tenants:
            self.salt(tenant)
        self.refresh()

    def close(self) -> None:
        """Stop following the store."""
        self._unwatch()

    def salt(self, tenant: str) -> bytes:
        """The salt of a tenant's keys; makes the tenant known."""
        salt = self._salts.get(tenant)
        if salt is None:
            salt = self._salts[tenant] = tenant_salt(tenant, self._secret)
            self._books[tenant] = _Book()
            if self._strange:
                # What this tenant gave to an earlier life of the node is found now.
                self._anew = True
        return salt

    def _hint(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            if len(self._hints) + len(keys) > _HINTS:
                self._anew = True
                self._hints.clear()
            elif not self._anew:
                self._hints.update(keys)

    def refresh(self) -> None:
        """Follow what the store has told since the last call; O(changes)."""
        if not self._hints and not self._anew:
            return
        with self._lock:
            anew, self._anew = self._anew, False
            hints, self._hints = list(self._hints), set()
        if anew:
            entries: list[Entry] = list(self._store.walk())
            held = {entry.key for entry in entries}
            gone = [key for key in (*self._lines, *self._strange) if key not in held]
        else:
            found = self._store.entries(hints)
            entries = sorted((entry for entry in found if entry is not None), key=lambda entry: entry.end)
            gone = [key for key, entry in zip(hints, found) if entry is None]
        for key in gone:
            self._went(key)
        for entry in entries:
            if entry.key not in self._lines:
                self._came(entry)

    def _came(self, entry: Entry) -> None:
        if entry.key in self._withheld:
            return
        line = self._lines.get(entry.parent) if entry.parent != ROOT else self._proven(entry.key)
        if line is None:
            self._strange[entry.key] = None
            return
        self._strange.pop(entry.key, None)
        self._lines[entry.key] = line
        book = self._books[line.tenant]
        book.keys[entry.key] = None
        book.note(entry.key)

    def _went(self, key: bytes) -> None:
        self._strange.pop(key, None)
        line = self._lines.pop(key, None)
        if line is not None:
            book = self._books[line.tenant]
            book.keys.pop(key, None)
            book.note(key)

    def _proven(self, key: bytes) -> Line | None:
        with self._store.read() as reader:
            view = reader.peek(key)
            if view is None:
                return None
            space, tokens = view.header.space, view.tokens.copy()
            del view
        for tenant, salt in self._salts.items():
            if prefix_key(space, salt, ROOT, tokens) == key:
                return Line(tenant, space)
        return None

    def line(self, key: bytes) -> Line | None:
        """Whose held block this is, and of which space; None if it is nobody's, not held, or withheld."""
        return self._lines.get(key)

    @property
    def waiting(self) -> list[bytes]:
        """All blocks that are being withheld."""
        return list(self._withheld)

    def withheld(self, key: bytes) -> Line | None:
        """Whose block this is if it is being withheld."""
        return self._withheld.get(key)

    def withhold(self, key: bytes, line: Line) -> None:
        """A block is about to be stored that is not to be found before `release`."""
        self._withheld[key] = line

    def release(self, keys: Iterable[bytes]) -> None:
        """These blocks may be found from the next `refresh` on, if they are held."""
        known = [key for key in keys if self._withheld.pop(key, None) is not None]
        self._hint([*known, *self._strange] if known else [])

    def held(self, tenant: str) -> tuple[int, Sequence[bytes]]:
        """The version and all keys of a tenant, parents before children."""
        book = self._books.get(tenant)
        return (book.version, list(book.keys)) if book is not None else (1, [])

    def changes(self, tenant: str, since: int) -> tuple[int, Sequence[bytes], Sequence[bytes]] | None:
        """The version, and the keys that came and went since version ``since``; None if that is not known."""
        book = self._books.get(tenant)
        if book is None or not book.floor <= since <= book.version:
            return None
        named: dict[bytes, None] = {}
        for version, key in reversed(book.log):
            if version <= since:
                break
            named[key] = None
        came = [key for key in reversed(named) if key in book.keys]
        return book.version, came, [key for key in named if key not in book.keys]

    def check(self) -> None:
        """Raises AssertionError where books, lines and store disagree. O(entries)."""
        self.refresh()
        held = {entry.key: entry for entry in self._store.walk()}
        assert sum(len(book.keys) for book in self._books.values()) == len(self._lines)
        for key, line in self._lines.items():
            assert key in self._books[line.tenant].keys, "a key is not in its tenant's book"
            assert key in held, "a key is in the directory and not in the store"
            parent = held[key].parent
            assert parent == ROOT or self._lines[parent] == line, "a block has another tenant than its parent"
        assert not any(key in self._lines for key in (*self._withheld, *self._strange))
