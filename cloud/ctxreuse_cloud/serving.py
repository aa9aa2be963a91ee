"""A store on the bus: who may connect, whose blocks they see, and the server. The node and connectors open it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from ctxreuse.bus.auth.allowlist import ALLOW_FILE, keys_folder
from ctxreuse.bus.auth.curve import LOCAL, ServerAuth
from ctxreuse.bus.protocol.messages import Terms
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.transport import BusServer
from ctxreuse.config.schema import BusConfig
from ctxreuse.identity.keys import giver_id
from ctxreuse.peer.serve.encoder import BlockEncoder
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.store import TieredStore

__all__ = ["open_auth", "open_server", "open_service", "serve_store"]


def open_auth(bus: BusConfig) -> ServerAuth | None:
    """Read key and allow-list; None without a key, for loopback. Raises ConfigError if one is invalid."""
    if not bus.key_file:
        return None
    return ServerAuth.open(bus.key_file, bus.allow_file or keys_folder() / ALLOW_FILE)


def open_service(
    store: TieredStore, folder: str | os.PathLike[str], auth: ServerAuth | None, **options: Any
) -> StoreService:
    """Return the service of a store that this process writes, for the tenants of ``auth``, else of `LOCAL` alone.

    Args:
        store: outlives the service.
        folder: keeps the node's secret and the quarantine.
        auth: None: peers of this machine, without a key.
        options: others of `ServeOptions`.
    """
    if auth is None:
        options |= {"tenant_of": _local, "giver_of": lambda user: giver_id(user.encode()), "tenants": [LOCAL]}
    else:
        tenants = [entry.tenant for entry in auth.allow.entries]
        options |= {"tenant_of": auth.tenant, "giver_of": auth.giver, "tenants": tenants}
        options["revoked"] = lambda: auth.allow.revoked
    return StoreService(store, folder, ServeOptions(**options))


def open_server(service: StoreService, bus: BusConfig, auth: ServerAuth | None) -> BusServer:
    """Start a server, to be closed before the service. Raises ConfigError for an address that cannot be used."""
    heartbeat = int(bus.heartbeat * 1000)
    terms = Terms(max_payload=bus.max_payload, heartbeat_ms=heartbeat, silence_ms=5 * heartbeat)
    server = BusServer(service, bus.bind, auth=auth, limits=Limits(terms=terms), insecure=bus.insecure)
    server.start()
    return server


def serve_store(store: TieredStore, folder: str | os.PathLike[str], bus: BusConfig) -> ExitStack:
    """Serve a store to devices, with levels that they allow; nothing is computed for them. Closing the result ends it.

    Raises ConfigError for an address or a key that cannot be used.
    """
    with ExitStack() as stack:
        auth, encoder = open_auth(bus), BlockEncoder()
        stack.callback(encoder.close)
        service = open_service(store, folder, auth, encoder=encoder)
        stack.callback(service.close)
        stack.callback(open_server(service, bus, auth).close)
        return stack.pop_all()


def _local(user: str) -> str | None:
    return LOCAL if user == LOCAL else None
