"""The sidecar as one ASGI application, and its life as a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from ctxreuse.config import Settings
from ctxreuse.daemon.front import Front, is_loopback
from ctxreuse.daemon.life import Daemon
from ctxreuse.daemon.openai import ApiError
from ctxreuse.daemon.probes import probes
from ctxreuse_cloud.node import Node
from ctxreuse_cloud.proxy.body import Receive
from ctxreuse_cloud.proxy.proxy import Scope
from ctxreuse_cloud.proxy.stream import Send

__all__ = ["ADDRESS_FILE", "Sidecar", "address_file", "serve"]

#: In the store's folder: where the sidecar that owns it can be reached.
ADDRESS_FILE = "cloud.json"


def address_file(settings: Settings) -> Path:
    """The file that says where the sidecar of these settings can be reached."""
    return settings.cloud.folder() / ADDRESS_FILE


class Sidecar:
    """``/v1`` goes to the proxy with nothing in between; everything else to a few routes for those who watch."""

    def __init__(self, node: Node, daemon: Daemon) -> None:
        self._node, self._daemon = node, daemon
        routes = [*probes(self._not_ready, node.metrics.render), Route("/api/status", self._status)]
        routes.append(Route("/api/why/{name:path}", self._why))
        # Probes and scrapes come from other machines; what names peers does not leave this one.
        self._front = Front(Router(routes), metrics=node.metrics, route=_route, local=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        proxy = self._node.proxy
        if proxy is not None and scope["type"] == "http" and scope["path"].startswith("/v1/"):
            await proxy(scope, receive, send)
        else:
            await self._front(scope, receive, send)

    def _not_ready(self) -> str:
        return self._daemon.not_ready() or self._node.not_ready()

    async def _why(self, request: Request) -> Response:
        """With a key: the tenant's own request; without one, from this machine: any."""
        given = request.headers.get("authorization")
        tenant: str | None = None
        if given is None or self._node.tenants.open:
            _from_here(request)
        else:
            tenant = self._node.tenants.find(given.encode("latin-1"))
            if tenant is None:
                raise ApiError(401, "a valid key is needed: Authorization: Bearer KEY", type="authentication_error")
        proxy = self._node.proxy
        found = proxy.asked.explain(request.path_params["name"], tenant) if proxy is not None else None
        if found is None:
            # The same for what never was and for what another tenant asked.
            raise ApiError(404, "no such request is remembered", type="not_found_error", code="no_such_request")
        import msgspec

        return Response(msgspec.json.encode(found), media_type="application/json")

    def _status(self, request: Request) -> Response:  # not async: it waits for locks
        _from_here(request)
        import msgspec

        body = self._node.status()
        body["state"] = self._not_ready() or "ready"
        return Response(msgspec.json.encode(body), media_type="application/json")


def _from_here(request: Request) -> None:
    client, host = request.client, request.url.hostname or ""
    if client is None or not is_loopback(client.host) or not is_loopback(host):
        raise ApiError(403, "only programs of this machine are told", type="permission_error")


def _route(path: str) -> str:
    return "api" if path.startswith("/api/") else "probes"


def serve(settings: Settings, ready_file: Path | None = None) -> int:
    """Run the sidecar until it is told to stop; returns the exit code. Raises ConfigError and what opening raises.

    ``ready_file``: written when it is ready, in place of the one in the store's folder.
    """
    cloud = settings.cloud
    node = Node(settings)
    file = ready_file or address_file(settings)
    daemon = Daemon(
        "cloud", host=cloud.host, port=cloud.port, drain=cloud.drain, linger=cloud.linger, address_file=file
    )
    app: Any = Sidecar(node, daemon)
    print(f"ctxreuse-cloud listens on {daemon.bind()}", flush=True)
    return daemon.run(app, node.opened)
