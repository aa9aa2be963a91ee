"""Access control: loopback names, web pages, requests that a proxy forwarded, keys and their scopes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from starlette.types import Scope

from ctxreuse.config.hosts import is_loopback
from ctxreuse.daemon.key_file import ApiKey, KeyScope
from ctxreuse.daemon.keys import Keys, given_key
from ctxreuse.daemon.openai import ApiError
from ctxreuse.daemon.page.routes import EVENTS, FILES
from ctxreuse.daemon.probes import PROBES

__all__ = ["Access", "KnownKey", "check_local", "from_here", "host_names", "is_forwarded"]

#: Paths that reveal other callers: open to this machine, with a key, or with the admin token.
_ADMIN_PATHS = ("/api/status", EVENTS, "/api/why")
#: Scopes of which one opens a path, and what is below it; other paths: ``answers``. Of explanations a key has its own,
#: with ``admin`` those of others, too.
_SCOPES: dict[str, tuple[KeyScope, ...]] = {
    "/metrics": ("metrics", "admin"),
    "/api/status": ("status", "admin"),
    EVENTS: ("status", "admin"),
    "/api/why": ("answers", "admin"),
    "/api/backends": ("admin",),
    "/api/forget": ("answers", "admin"),
    "/api/compact": ("answers", "admin"),
}
#: Probes, and the page's files, without private data: open to all callers, under any host name.
_METRICS = "/metrics"
_OPEN_PATHS = (*(path for path in PROBES if path != _METRICS), *FILES)

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


def check_local(scope: Scope, names: Collection[str] = ()) -> None:
    """Raise ApiError (403) unless the caller is on this machine or has the admin token (`Access.admit`)."""
    client = scope.get("client")
    if scope["state"].get("admin"):
        return
    here = client is not None and is_loopback(client[0]) and not is_forwarded(scope["headers"])
    if not here or not from_here(_header(scope, b"host"), _header(scope, b"origin"), names):
        text = "only programs of this machine may read this without the admin token: Authorization: Bearer TOKEN"
        raise ApiError(403, text, type="permission_error")


class KnownKey(NamedTuple):
    """The key of a request, and the keys that it is one of."""

    keys: Keys
    key: ApiKey


@dataclass(frozen=True)
class Access:
    """Access rules of a daemon.

    Attributes:
        keys: API keys, one of which a request must carry; None: no key is required.
        names: without keys, the hosts besides loopback that programs may address it by; None: any host, and each
            route decides.
        forwarded: without keys, requests that a proxy passed on are served, too.
        admin: further keys, which open status, explanations and metrics from anywhere, as their scopes say.
    """

    keys: Keys | None = None
    names: Collection[str] | None = ()
    forwarded: bool = False
    admin: Sequence[Keys] = ()

    def admit(self, scope: Scope) -> None:
        """Raise ApiError (401, 403) if the request is not served.

        Its state records its ``key`` (a `KnownKey`), whether that opens its path (``granted``), and whether it may
        read what reveals others (``admin``).
        """
        path = scope["path"]
        if path in _OPEN_PATHS:
            return
        known = [self.keys, *self.admin] if self.keys is not None else self.admin
        given = given_key(scope["headers"])
        found = next((KnownKey(keys, key) for keys in known if (key := keys.find(given)) is not None), None)
        scopes = _SCOPES.get("/".join(path.split("/", 3)[:3]), ("answers",))
        guarded = self.keys is not None
        if path == _METRICS:
            guarded = any(keys.guard("metrics") for keys in known)
            if self.keys is not None and not guarded:
                return
        granted = found is not None and any(one in found.key.scopes for one in scopes)
        if granted:
            scope["state"]["granted"] = True
        if granted and "admin" in scopes and found is not None and "admin" in found.key.scopes:
            scope["state"]["admin"] = True
        if guarded:
            if found is None:
                text = "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY"
                raise ApiError(401, text, type="authentication_error", code="invalid_api_key")
            if not granted:
                raise ApiError(403, f"this key has not the scope {' or '.join(scopes)}", type="permission_error")
            scope["state"]["key"] = found
        elif "admin" not in scope["state"]:
            self._check_caller(scope)

    def _check_caller(self, scope: Scope) -> None:
        """Raise ApiError (403) for callers who may be elsewhere, where no key is required."""
        if self.names is None:
            return
        if not from_here(_header(scope, b"host"), _header(scope, b"origin"), self.names):
            raise ApiError(403, "only programs of this machine may use this daemon", type="permission_error")
        if is_forwarded(scope["headers"]) and not self.forwarded:
            text = "a proxy passed the request on, and without API keys only programs of this machine are served"
            raise ApiError(403, text, type="permission_error")
        if scope["path"].startswith(_ADMIN_PATHS):
            check_local(scope, self.names)


def _header(scope: Scope, name: bytes) -> str:
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found.decode("latin-1")
