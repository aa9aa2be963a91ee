"""Addresses of daemons: recognising and parsing them."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from ctxreuse.errors import ConfigError

__all__ = ["Address", "is_url", "parse_address"]

_PORTS = {"http": 80, "https": 443}
_FIX = "Write http://127.0.0.1:7351"


class Address(NamedTuple):
    """Where a daemon listens; ``key``: its API key, "" without one."""

    scheme: str
    host: str
    port: int
    key: str = ""

    @property
    def url(self) -> str:
        """The address without its key."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def is_url(text: str) -> bool:
    """Return True if ``text`` is meant as a URL, of whatever scheme, rather than as a name or a folder."""
    return "://" in text


def parse_address(url: str) -> Address:
    """Parse ``http[s]://[KEY@]HOST[:PORT]``. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a valid address: {error}", fix=_FIX) from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigError(f"{url!r} is not the address of a daemon", fix=_FIX)
    return Address(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], unquote(parts.username or ""))
