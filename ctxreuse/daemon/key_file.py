"""Files of API keys: one key a line, or JSON with names, scopes, expiry and limits, of which only hashes are stored.

The JSON has a secret that salts of tenants are derived from, and for each key its SHA-256 and whose it is. Keys are 256
random bits, so a plain hash cannot be searched.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from ctxreuse.errors import ConfigError
from ctxreuse.private import make_private_folder, warn_if_shared

__all__ = ["ApiKey", "KeyFile", "KeyList", "KeyScope", "hash_key", "is_json", "key_list", "read_keys"]

#: What a key may do: ask models; read the daemon's state; read metrics; all of these but asking, and explanations of
#: what others asked.
KeyScope: TypeAlias = Literal["answers", "status", "metrics", "admin"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_FILE = 16 << 20


class ApiKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """One key.

    ``tenant``: whose it is; the keys of one name have one share. ``sha256``: its hash in hex, of which the first 12
    digits are its id. Times are Unix seconds, ``expires`` 0: never. ``requests``, ``tokens``: at most in a minute, 0:
    unlimited; tokens are those of prompts that were computed, not reused, and those of answers.
    """

    tenant: str
    sha256: str
    created: float = 0.0
    scopes: tuple[KeyScope, ...] = ("answers",)
    expires: float = 0.0
    requests: int = 0
    tokens: int = 0

    @property
    def id(self) -> str:
        """Id of the key, for listing and revoking."""
        return self.sha256[:12]


class KeyList(msgspec.Struct, frozen=True):
    """The content of a file; ``secret``: "" where the file has none."""

    version: int
    secret: str
    keys: tuple[ApiKey, ...] = ()


def hash_key(key: str) -> str:
    """Return the SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(file: str) -> tuple[str, ...]:
    """Return the API keys in a file, one per line, ``#`` begins a comment; none for "". Raises ConfigError."""
    if not file:
        return ()
    keys = _lines(Path(file).expanduser())
    if not keys:
        raise ConfigError("the API key file is empty", where=file, fix="Write one key per line, or name no file")
    return keys


def _lines(path: Path) -> tuple[str, ...]:
    warn_if_shared(path, "the API keys in")
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API key file cannot be read: {error}", where=str(path)) from None
    return tuple(line for line in (line.partition("#")[0].strip() for line in lines) if line)


def key_list(path: Path, scopes: tuple[KeyScope, ...]) -> KeyList:
    """Return the keys in a file of either form; ``scopes``: those of keys that are lines. Raises ConfigError."""
    if is_json(path):
        warn_if_shared(path, "the API keys in")
        return KeyFile(path).read(shared=True)
    digests = dict.fromkeys(map(hash_key, _lines(path)))
    return KeyList(1, "", tuple(ApiKey(f"key-{one[:12]}", one, scopes=scopes) for one in digests))


def is_json(path: Path) -> bool:
    """Return True if a file of keys is JSON, not lines. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 10).lstrip().startswith(b"{")
    except OSError as error:
        raise ConfigError(f"the API key file cannot be read: {error}", where=str(path)) from None


class KeyFile:
    """The JSON file of API keys, for the commands that change it; one process at a time may."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, *, shared: bool = False) -> KeyList:
        """Return its content, empty if there is no file. Raises ConfigError for a file that other users may access,
        unless it may be ``shared``."""
        try:
            with open(self.path, "rb") as file:
                if not shared and stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                    raise ConfigError(
                        "other users may access the key file", where=str(self.path), fix=f"Run: chmod 600 {self.path}"
                    )
                return msgspec.json.decode(file.read(_MAX_FILE), type=KeyList)
        except FileNotFoundError:
            return KeyList(1, secrets.token_hex(32))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            fix = "It is made by `keys add` of the edge, or `tenants add` of the cloud; lines of keys go into another"
            raise ConfigError(f"the key file cannot be read: {error}", where=str(self.path), fix=fix) from None

    def add(
        self,
        tenant: str,
        scopes: tuple[KeyScope, ...] = ("answers",),
        *,
        lasts: float = 0.0,
        requests: int = 0,
        tokens: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> str:
        """Create a key for a tenant, valid for ``lasts`` seconds (0: for ever), and return it; only its hash is kept.

        Raises ConfigError for an invalid name.
        """
        if not _NAME.fullmatch(tenant):
            raise ConfigError(
                f"no tenant can be called {tenant!r}", fix="Letters, digits, dot, dash and underscore, at most 64"
            )
        content, now = self.read(), clock()
        key = f"ctxr-{secrets.token_urlsafe(32)}"
        made = ApiKey(tenant, hash_key(key), now, scopes, now + lasts if lasts else 0.0, requests, tokens)
        self._write(msgspec.structs.replace(content, keys=(*content.keys, made)))
        return key

    def revoke(self, name: str) -> int:
        """Revoke a key by its id, or all keys of a tenant; returns the number. Raises ConfigError if there is none."""
        content = self.read()
        kept = tuple(key for key in content.keys if name not in (key.id, key.tenant))
        if len(kept) == len(content.keys):
            raise ConfigError(f"no key and no tenant is called {name!r}", where=str(self.path))
        self._write(msgspec.structs.replace(content, keys=kept))
        return len(content.keys) - len(kept)

    def _write(self, content: KeyList) -> None:
        make_private_folder(self.path.parent)
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
