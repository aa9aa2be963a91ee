"""Tenants of the proxy, by their API keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ctxreuse.daemon.key_file import ApiKey, KeyFile
from ctxreuse.daemon.keys import Keys, WatchedRequest, given_key
from ctxreuse.daemon.rates import KeyRates
from ctxreuse.identity.keys import tenant_salt

__all__ = ["DEFAULT", "Tenants"]

#: Tenant of all requests where no keys are required.
DEFAULT = "default"

_ANYONE, _UNLIMITED = ApiKey(DEFAULT, ""), KeyRates(0, 0)


class Tenants:
    """Finds the tenant of a request; for one event loop. Without a file all requests are of the tenant ``default``."""

    def __init__(self, file: KeyFile | None) -> None:
        #: None: no key is required.
        self.keys = Keys(file.path, lambda _: file.read()) if file is not None else None

    @property
    def open(self) -> bool:
        """True if no key is required."""
        return self.keys is None

    def find(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiKey | None:
        """Return the key in the headers of a request, see `given_key`; None without a valid one."""
        return self.keys.find(given_key(headers)) if self.keys is not None else _ANYONE

    def watch(self, key: ApiKey) -> contextlib.AbstractContextManager[WatchedRequest | None]:
        """See `Keys.watch`; None where no key is required."""
        return self.keys.watch(key) if self.keys is not None else contextlib.nullcontext()

    def rates(self, key: ApiKey) -> KeyRates:
        """Return what a key may still take."""
        return self.keys.rates(key) if self.keys is not None else _UNLIMITED

    def salt(self, tenant: str) -> str:
        """Return the ``cache_salt`` of a tenant: hex digits that only this node can derive."""
        return tenant_salt(tenant, bytes.fromhex(self.keys.secret if self.keys is not None else "")).hex()
