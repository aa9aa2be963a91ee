"""Who may connect: the allow-list of public keys, a TOML file that a running server follows.

::

    [[key]]
    name = "laptop"                    # the user of this key; one live key a name
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

__all__ = ["ALLOW_FILE", "CURVE_BYTES", "NAME", "AllowList", "Allowed", "key_place", "keys_folder"]

#: Bytes of a CURVE key, public or secret.
CURVE_BYTES = 32
ALLOW_FILE = "allow.toml"
#: What names of keys and tenants look like: they become file names, log words and labels.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MAX_FILE = 16 << 20
_HEAD = "# Public keys that may connect, as `ctxreuse keys` writes them; a running server follows it.\n"

_log = logging.getLogger(__name__)


def keys_folder() -> Path:
    """Where keys are kept unless something else is said: ``keys`` in the user's config folder."""
    import platformdirs

    return platformdirs.user_config_path("ctxreuse", appauthor=False) / "keys"


def key_place(named: str | Path, suffix: str) -> Path:
    """The file of a key: ``named`` itself, or if that is only a name (``laptop``) the one of `keys_folder`."""
    place = Path(named).expanduser()
    if NAME.fullmatch(str(named)) and not place.exists():
        kept = keys_folder() / f"{named}{suffix}"
        return kept if kept.exists() else place
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
    """The allow-list in ``path``, read again whenever the file has changed. Any thread may call.

    A file that does not exist allows nobody. One that became unreadable leaves the last good list in force and is
    logged once a change: a slip while editing must neither let a stranger in nor lock everybody out.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises ConfigError if the file is there but is no allow-list."""
        self.path = Path(path).expanduser()
        self._lock = threading.Lock()
        self._stamp = _stamp(self.path)
        self._set(_read(self.path))

    def _set(self, entries: tuple[Allowed, ...]) -> None:
        self._entries = entries
        self._live = {entry.public: entry for entry in entries if entry.revoked is None}

    @property
    def entries(self) -> tuple[Allowed, ...]:
        """All entries as last read, revoked ones too."""
        return self._entries

    def refresh(self) -> bool:
        """Read the file again if it is another than before; True if the list in force changed. One `stat` if not."""
        with self._lock:
            stamp = _stamp(self.path)
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            try:
                entries = _read(self.path)
            except ConfigError as error:
                _log.error("the allow-list was not taken, the last good one stays in force: %s", error)
                return False
            changed = entries != self._entries
            self._set(entries)
            return changed

    def find(self, public: bytes) -> Allowed | None:
        """The live entry of a public key; None for an unknown or revoked one."""
        return self._live.get(public)

    def named(self, name: str) -> Allowed | None:
        """The live entry of a name."""
        return next((entry for entry in self._live.values() if entry.name == name), None)

    def allow(self, entry: Allowed) -> None:
        """Add a key, or allow a revoked one again. Raises ConfigError if its name or key has another live entry."""
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
            # What the new entry replaces; other revoked entries stay as a record.
            entries[:] = [other for other in entries if other.public != entry.public] + [entry]

    def revoke(self, which: str | bytes, when: datetime) -> Allowed:
        """Revoke the live key of a name, or a public key; returns its entry. Raises ConfigError if there is none."""
        with self._change() as entries:
            for i, entry in enumerate(entries):
                if entry.revoked is None and which in (entry.name, entry.public):
                    entries[i] = msgspec.structs.replace(entry, revoked=when)
                    return entries[i]
            live = [entry.name for entry in entries if entry.revoked is None]
        name = which if isinstance(which, str) else which.hex()
        near = difflib.get_close_matches(name, live, n=1)
        fix = f"Did you mean {near[0]}?" if near else "`ctxreuse keys list` shows who is"
        raise ConfigError(f"no key {name!r} is allowed", where=str(self.path), fix=fix)

    @contextlib.contextmanager
    def _change(self) -> Iterator[list[Allowed]]:
        """Read, change and replace the file while no other process does."""
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
            with open(beside, "w", encoding="utf-8") as file:
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
        live = [entry for entry in entries if entry.revoked is None]
        for what in ("name", "public"):
            if len({getattr(entry, what) for entry in live}) < len(live):
                raise ValueError(f"two live entries have the same {what}")
    except (ValueError, RecursionError) as error:  # of TOML, text, types and our own rules
        fix = "Correct it, or write it anew with `ctxreuse keys allow`"
        raise ConfigError(f"this is no allow-list: {error}", where=str(path), fix=fix) from None
    return entries


def _entry(row: _Row) -> Allowed:
    public = bytes.fromhex(row.public)
    if len(public) != CURVE_BYTES:
        raise ValueError(f"the key of {row.name!r} has {len(public)} bytes, not {CURVE_BYTES}")
    if not NAME.fullmatch(row.name) or not NAME.fullmatch(row.tenant):
        raise ValueError(f"{row.name!r} or {row.tenant!r} cannot be a name")
    return Allowed(row.name, public, row.tenant, row.added, row.revoked)
