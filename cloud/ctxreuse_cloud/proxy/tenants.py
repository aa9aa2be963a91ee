"""API keys of tenants, of which only hashes are stored.

The file is JSON, readable by its owner only: a secret that salts of tenants are derived from, and for each key its
SHA-256 and tenant. Keys are 256 random bits, so a plain hash cannot be searched.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import tenant_salt
from ctxreuse.private import make_private_folder

__all__ = ["DEFAULT", "ApiKey", "KeyFile", "Tenants"]

#: Tenant of all requests where no keys are required.
DEFAULT = "default"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_FILE = 16 << 20


class ApiKey(msgspec.Struct, frozen=True):
    """One key: its tenant, its hash in hex (the first 12 digits are its id), and when it was made (Unix seconds)."""

    tenant: str
    sha256: str
    created: float

    @property
    def id(self) -> str:
        """Id of the key, for listing and revoking."""
        return self.sha256[:12]


class _Content(msgspec.Struct, frozen=True):
    version: int
    secret: str
    keys: tuple[ApiKey, ...] = ()


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class KeyFile:
    """The file of API keys, for the commands that change it; one process at a time may."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> _Content:
        """Return its content, empty if there is no file. Raises ConfigError for a file that other users may access."""
        try:
            with open(self.path, "rb") as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                    raise ConfigError(
                        "other users may access the key file", where=str(self.path), fix=f"Run: chmod 600 {self.path}"
                    )
                return msgspec.json.decode(file.read(_MAX_FILE), type=_Content)
        except FileNotFoundError:
            return _Content(1, secrets.token_hex(32))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"the key file cannot be read: {error}", where=str(self.path)) from None

    def add(self, tenant: str, clock: Callable[[], float] = time.time) -> str:
        """Create a key for a tenant and return it; only its hash is kept. Raises ConfigError for an invalid name."""
        if not _NAME.fullmatch(tenant):
            raise ConfigError(
                f"no tenant can be called {tenant!r}", fix="Letters, digits, dot, dash and underscore, at most 64"
            )
        content = self.read()
        key = f"ctxr-{secrets.token_urlsafe(32)}"
        self._write(msgspec.structs.replace(content, keys=(*content.keys, ApiKey(tenant, _hash(key), clock()))))
        return key

    def revoke(self, name: str) -> int:
        """Revoke a key by its id, or all keys of a tenant; returns the number. Raises ConfigError if there is none."""
        content = self.read()
        kept = tuple(key for key in content.keys if name not in (key.id, key.tenant))
        if len(kept) == len(content.keys):
            raise ConfigError(f"no key and no tenant is called {name!r}", where=str(self.path))
        self._write(msgspec.structs.replace(content, keys=kept))
        return len(content.keys) - len(kept)

    def _write(self, content: _Content) -> None:
        make_private_folder(self.path.parent)
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)


class Tenants:
    """Finds the tenant of a request; for one event loop. Without a file all requests are of the tenant ``default``."""

    def __init__(self, file: KeyFile | None) -> None:
        self._file = file
        self._seen: tuple[int, int] | None = None
        self._content = _Content(1, "")
        self._known: dict[str, ApiKey] = {}
        self.refresh()

    @property
    def open(self) -> bool:
        """True if no key is required."""
        return self._file is None

    def refresh(self) -> bool:
        """Reload the file if it has changed; returns whether it has. On ConfigError the old keys stay in use."""
        if self._file is None:
            return False
        try:
            now = os.stat(self._file.path)
            seen = (now.st_mtime_ns, now.st_ino)
        except OSError:
            seen = None
        if seen == self._seen and self._content.secret:
            return False
        self._content = self._file.read()
        self._known = {key.sha256: key for key in self._content.keys}
        changed, self._seen = seen != self._seen, seen
        return changed

    def find(self, authorization: bytes | None) -> str | None:
        """Return the tenant of the key in an ``Authorization`` header; None without a known key."""
        if self._file is None:
            return DEFAULT
        scheme, _, key = (authorization or b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(key.strip()) <= 512:
            return None
        # Hashes are looked up, which a caller cannot choose, so the time tells nothing about keys.
        digest = _hash(key.strip())
        found = self._known.get(digest)
        return found.tenant if found is not None and hmac.compare_digest(found.sha256, digest) else None

    def salt(self, tenant: str) -> str:
        """Return the ``cache_salt`` of a tenant: hex digits that only this node can derive."""
        return tenant_salt(tenant, bytes.fromhex(self._content.secret)).hex()
