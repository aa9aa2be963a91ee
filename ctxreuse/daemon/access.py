"""Access control: loopback names, web pages, requests that a proxy forwarded, keys and their files."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.types import Scope

from ctxreuse.config.hosts import is_loopback
from ctxreuse.daemon.openai import ApiError
from ctxreuse.daemon.probes import PROBES
from ctxreuse.errors import ConfigError
from ctxreuse.private import warn_if_shared

__all__ = ["Access", "bearer", "check_local", "from_here", "host_names", "is_forwarded", "read_keys"]

#: Paths that reveal other callers: open to this machine, with a key, or with the admin token.
_ADMIN_PATHS = ("/api/status", "/api/why")
#: Probes without private data: open to all callers, under any host name.
_OPEN_PATHS = tuple(path for path in PROBES if path != "/metrics")

#: ``Host`` (RFC 9110): a name, an IPv4 or a bracketed IPv6 address, and a port; and an ``Origin`` with one.
_HOST = re.compile(r"([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{0,31}://([^/?#]+)")


def _name(host: str) -> str:
    """Return the name in a ``Host`` header, in lower case; "" unless it is exactly one."""
    found = _HOST.fullmatch(host)
    return "" if found is None or int(found[2] or 0) > 65535 else found[1].strip("[]").lower()


def from_here(host: str, origin: str, names: Collection[str] = ()) -> bool:
    """Return False for a request made by a web page, by its ``Host`` and ``Origin`` ("": none).

    Otherwise any page that a user visits could use a server on loopback, and after DNS rebinding read its answers.
    ``names``: hosts, in lower case, that count as this machine besides loopback.
    """
    page = _ORIGIN.fullmatch(origin)
    if origin and page is None:
        return False
    hosts = [_name(host)] if page is None else [_name(host), _name(page[1])]
    return all(name and (name in names or is_loopback(name)) for name in hosts)


def host_names(*texts: str) -> frozenset[str]:
    """Return the names in lists that are separated by commas or blanks, in lower case and without brackets."""
    return frozenset(name.strip("[]").lower() for text in texts for name in re.split(r"[,\s]+", text) if name)


def is_forwarded(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True if a header says that a proxy passed the request on, so that its caller may be anywhere.

    ``headers``: with names in lower case, as in ASGI.
    """
    return any(name in (b"forwarded", b"via", b"x-real-ip") or name.startswith(b"x-forwarded-") for name, _ in headers)


def _is_known(key: str, keys: Sequence[bytes]) -> bool:
    """Return True if ``key`` is one of ``keys``; all are compared, in constant time, so that timing reveals nothing."""
    given = key.encode()
    return sum(hmac.compare_digest(given, one) for one in keys) > 0


def bearer(scope: Scope) -> str:
    """Return the key in ``Authorization: Bearer KEY``, else in ``x-api-key``; "" without one."""
    kind, _, key = _header(scope, b"authorization").partition(" ")
    return key.strip() if kind.lower() == "bearer" else _header(scope, b"x-api-key").strip()


def check_local(scope: Scope, names: Collection[str] = ()) -> None:
    """Raise ApiError (403) unless the caller is on this machine or has the admin token (`Access.admit`)."""
    client = scope.get("client")
    if scope["state"].get("admin"):
        return
    here = client is not None and is_loopback(client[0]) and not is_forwarded(scope["headers"])
    if not here or not from_here(_header(scope, b"host"), _header(scope, b"origin"), names):
        text = "only programs of this machine may read this without the admin token: Authorization: Bearer TOKEN"
        raise ApiError(403, text, type="permission_error")


@dataclass(frozen=True)
class Access:
    """Access rules of a daemon.

    Attributes:
        keys: API keys, one of which a request must carry; none: no key is required.
        names: without keys, the hosts besides loopback that programs may address it by; None: any host, and each
            route decides.
        forwarded: without keys, requests that a proxy passed on are served, too.
        admin: tokens that open status and explanations from anywhere.
    """

    keys: Sequence[str] = ()
    names: Collection[str] | None = ()
    forwarded: bool = False
    admin: Sequence[str] = ()

    def admit(self, scope: Scope) -> None:
        """Raise ApiError (401, 403) if the request is not served; its state records whether it had the admin token."""
        path, key = scope["path"], bearer(scope)
        if self.admin and path.startswith(_ADMIN_PATHS) and _is_known(key, [one.encode() for one in self.admin]):
            scope["state"]["admin"] = True
            return
        if path in _OPEN_PATHS:
            return
        if self.keys:
            if path not in PROBES and not _is_known(key, [one.encode() for one in self.keys]):
                raise ApiError(
                    401,
                    "an API key is required: Authorization: Bearer KEY, or x-api-key: KEY",
                    type="authentication_error",
                )
        elif self.names is not None:
            if not from_here(_header(scope, b"host"), _header(scope, b"origin"), self.names):
                raise ApiError(403, "only programs of this machine may use this daemon", type="permission_error")
            if is_forwarded(scope["headers"]) and not self.forwarded:
                text = "a proxy passed the request on, and without API keys only programs of this machine are served"
                raise ApiError(403, text, type="permission_error")
            if path.startswith(_ADMIN_PATHS):
                check_local(scope, self.names)


def _header(scope: Scope, name: bytes) -> str:
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found.decode("latin-1")


def read_keys(file: str) -> tuple[str, ...]:
    """Return the API keys in a file, one per line, ``#`` begins a comment; none for "". Raises ConfigError."""
    if not file:
        return ()
    place = Path(file).expanduser()
    warn_if_shared(place, "the API keys in")
    try:
        lines = place.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API key file cannot be read: {error}", where=file) from None
    keys = tuple(line for line in (line.partition("#")[0].strip() for line in lines) if line)
    if not keys:
        raise ConfigError("the API key file is empty", where=file, fix="Write one key per line, or name no file")
    return keys
