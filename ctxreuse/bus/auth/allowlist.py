"""The allow-list of public keys that may connect: a TOML file that a running server follows.

::

    [[key]]
    name = "laptop"                    # the user of this key; one active key per name
    public = "5f1c…"                   # 64 hexadecimal digits
    tenant = "me"                      # whose contexts it may read and write
    added = 2026-01-31T12:00:00Z
    revoked = 2026-02-01T08:30:00Z     # only once it is revoked

It is replaced as a whole (written beside, then renamed), so a reader sees the old list or the new one.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import logging
import os
import re
import threading
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import giver_id

__all__ = ["ALLOW_FILE", "CURVE_BYTES", "NAME", "AllowList", "Allowed", "key_place", "keys_folder"]

#: Bytes of a CURVE key, public or secret.
CURVE_BYTES = 32
ALLOW_FILE = "allow.toml"
#: Names of keys and tenants: they become file names, log words and labels.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MAX_FILE = 16 << 20
_HEAD = "# Public keys that may connect, as `ctxreuse keys` writes them; a running server follows it.\n"

_log = logging.getLogger(__name__)


def keys_folder() -> Path:
    """Return the default folder of keys: ``keys`` in the user's config folder."""
    import platformdirs

    return platformdirs.user_config_path("ctxreuse", appauthor=False) / "keys"


def _expanded(named: str | Path) -> Path:
    """``named`` with ``~`` replaced; ConfigError if it names the home of a user who has none."""
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"no such home folder: {error}", where=str(named), fix="Write the whole path") from None


def key_place(named: str | Path, suffix: str) -> Path:
    """Return the file of a key: ``named`` itself, or for a bare name (``laptop``) the one in `keys_folder`.

    Raises ConfigError for the home of an unknown user.
    """
    place = _expanded(named)
    if NAME.fullmatch(str(named)) and not place.is_file():  # a folder `cloud` is no key
        kept = keys_folder() / f"{named}{suffix}"
        return kept if kept.is_file() else place
    return place


class Allowed(msgspec.Struct, frozen=True):
    """One entry. ``public`` has 32 bytes; ``revoked`` is None while the key may connect."""

    name: str
    public: bytes
    tenant: str
    added: datetime
    revoked: datetime | None = None


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    public: str
    tenant: str
    added: datetime
    revoked: datetime | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: tuple[_Row, ...] = ()


class AllowList:
    """The allow-list in ``path``, read again when the file has changed. Any thread may call.

    A missing file allows no key. An unreadable one is logged and leaves the last good list in force: a typo must
    neither admit strangers nor lock all peers out.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the file. Raises ConfigError if it is not an allow-list."""
        self.path = _expanded(path)
        self._lock = threading.Lock()
        self._stamp = _stamp(self.path)
        self._set(_read(self.path))

    def _set(self, entries: tuple[Allowed, ...]) -> None:
        self._entries = entries
        self._active = {entry.public: entry for entry in entries if entry.revoked is None}
        #: `giver_id` of each key that was revoked and not allowed again.
        self.revoked = frozenset(giver_id(entry.public) for entry in entries if entry.public not in self._active)

    @property
    def entries(self) -> tuple[Allowed, ...]:
        """All entries as last read, including revoked ones."""
        return self._entries

    def refresh(self) -> bool:
        """Read the file again if it changed (one `stat`); returns True if the list in force changed."""
        with self._lock:
            stamp = _stamp(self.path)
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            try:
                entries = _read(self.path)
            except ConfigError as error:
                _log.error("the allow-list was not accepted, the last good one stays in force: %s", error)
                return False
            changed = entries != self._entries
            self._set(entries)
            return changed

    def find(self, public: bytes) -> Allowed | None:
        """Return the active entry of a public key; None if unknown or revoked."""
        return self._active.get(public)

    def named(self, name: str) -> Allowed | None:
        """Return the active entry of a name."""
        return next((entry for entry in self._active.values() if entry.name == name), None)

    def allow(self, entry: Allowed) -> None:
        """Add a key, or restore a revoked one. Raises ConfigError if its name or key has another active entry."""
        for what, text in (("name", entry.name), ("tenant", entry.tenant)):
            if not NAME.fullmatch(text):
                fix = "Use letters, digits and . _ @ -, at most 64, a letter or digit first"
                raise ConfigError(f"{text!r} cannot be the {what} of a key", fix=fix)
        if len(entry.public) != CURVE_BYTES:
            raise ConfigError(f"a public key has {CURVE_BYTES} bytes, not {len(entry.public)}")
        with self._change() as entries:
            for other in entries:
                if other.revoked is not None or (other.name, other.public) == (entry.name, entry.public):
                    continue
                if other.public == entry.public:
                    fix = f"Revoke it first: ctxreuse keys revoke {other.name}"
                    raise ConfigError(f"this key is allowed already, as {other.name!r}", where=str(self.path), fix=fix)
                if other.name == entry.name:
                    fix = f"Choose another with --name, or ctxreuse keys revoke {other.name}"
                    raise ConfigError(f"another key is called {entry.name!r}", where=str(self.path), fix=fix)
            # Replaces entries of the same key; other revoked ones stay as a record.
            entries[:] = [other for other in entries if other.public != entry.public] + [entry]

    def revoke(self, which: str | bytes, when: datetime) -> Allowed:
        """Revoke a key by name or public key; returns its entry. Raises ConfigError if there is none."""
        with self._change() as entries:
            for i, entry in enumerate(entries):
                if entry.revoked is None and which in (entry.name, entry.public):
                    entries[i] = msgspec.structs.replace(entry, revoked=when)
                    return entries[i]
            active = [entry.name for entry in entries if entry.revoked is None]
        name = which if isinstance(which, str) else which.hex()
        near = difflib.get_close_matches(name, active, n=1)
        fix = f"Did you mean {near[0]}?" if near else "`ctxreuse keys ls` shows who is"
        raise ConfigError(f"no key {name!r} is allowed", where=str(self.path), fix=fix)

    @contextlib.contextmanager
    def _change(self) -> Iterator[list[Allowed]]:
        """Read, change and replace the file under a lock."""
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"the folder of keys cannot be used: {error.strerror}", where=str(folder)) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = list(_read(self.path))
            before = list(entries)
            yield entries
            if entries != before:
                self._write(entries)
        except OSError as error:
            raise ConfigError(f"the allow-list cannot be written: {error.strerror}", where=str(self.path)) from None
        finally:
            os.close(lock)
        self.refresh()

    def _write(self, entries: list[Allowed]) -> None:
        beside = self.path.with_suffix(f".{os.getpid()}.new")
        try:
            made = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(made, "w", encoding="utf-8") as file:
                file.write(_HEAD + "".join(_text(entry) for entry in entries))
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _text(entry: Allowed) -> str:
    def text(moment: datetime) -> str:
        return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    lines = [f'\n[[key]]\nname = "{entry.name}"', f'public = "{entry.public.hex()}"', f'tenant = "{entry.tenant}"']
    lines += [f"added = {text(entry.added)}"] + ([f"revoked = {text(entry.revoked)}"] if entry.revoked else [])
    return "\n".join(lines) + "\n"


def _read(path: Path) -> tuple[Allowed, ...]:
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_FILE + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"the allow-list cannot be read: {error.strerror}", where=str(path)) from None
    try:
        if len(raw) > _MAX_FILE:
            raise ValueError(f"it has more than {_MAX_FILE} bytes")
        rows = msgspec.convert(tomllib.loads(raw.decode()), _File).key
        entries = tuple(_entry(row) for row in rows)
        active = [entry for entry in entries if entry.revoked is None]
        for what, values in (("name", {e.name for e in active}), ("public", {e.public for e in active})):
            if len(values) < len(active):
                raise ValueError(f"two active entries have the same {what}")
    except (ValueError, RecursionError) as error:  # of TOML, text, types and our own rules
        fix = "Correct it, or write a new one with `ctxreuse keys allow`"
        raise ConfigError(f"the allow-list is invalid: {error}", where=str(path), fix=fix) from None
    return entries


def _entry(row: _Row) -> Allowed:
    public = bytes.fromhex(row.public)
    if len(public) != CURVE_BYTES:
        raise ValueError(f"the key of {row.name!r} has {len(public)} bytes, not {CURVE_BYTES}")
    if not NAME.fullmatch(row.name) or not NAME.fullmatch(row.tenant):
        raise ValueError(f"{row.name!r} or {row.tenant!r} cannot be a name")
    return Allowed(row.name, public, row.tenant, row.added, row.revoked)
