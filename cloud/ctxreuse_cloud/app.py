"""The sidecar as one ASGI application, and how it is run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from ctxreuse.config import Settings
from ctxreuse.daemon.access import Access, check_local
from ctxreuse.daemon.key_metrics import KeyMetrics
from ctxreuse.daemon.keys import Keys, given_key
from ctxreuse.daemon.lifecycle import Daemon
from ctxreuse.daemon.middleware import ApiMiddleware
from ctxreuse.daemon.openai import ApiError
from ctxreuse.daemon.page.routes import page_routes
from ctxreuse.daemon.probes import probes
from ctxreuse.daemon.tls import certificate_of
from ctxreuse_cloud.node import CloudNode
from ctxreuse_cloud.page import cloud_feed
from ctxreuse_cloud.proxy.backends import TAKES, Takes
from ctxreuse_cloud.proxy.http import Receive
from ctxreuse_cloud.proxy.proxy import Scope, is_proxied
from ctxreuse_cloud.proxy.stream import Send

__all__ = ["ADDRESS_FILE", "Sidecar", "address_file", "serve"]

log = logging.getLogger(__name__)

#: In the store's folder: address of the sidecar that owns the store.
ADDRESS_FILE = "cloud.json"


def address_file(settings: Settings) -> Path:
    """Return the file with the address of the sidecar that runs with these settings."""
    return settings.cloud.folder() / ADDRESS_FILE


class Sidecar:
    """ASGI application: what backends serve goes to the proxy, everything else to probes, status and explanations."""

    def __init__(self, node: CloudNode, daemon: Daemon) -> None:
        self._node, self._daemon = node, daemon
        routes = [*probes(self._not_ready, node.metrics.exposition), Route("/api/status", self._status)]
        routes.append(Route("/api/why/{name:path}", self._why))
        routes.append(Route("/api/backends/{name:path}/{takes}", self._drain, methods=["POST"]))
        feed = cloud_feed(node, self._not_ready, lambda: daemon.state not in ("starting", "ready"))
        routes += page_routes(feed, _check_reader)
        # Probes and scrapes come from other machines; routes that name peers check who asks themselves.
        tokens = Keys.from_setting(node.settings.cloud.admin_token_file, ("admin",))
        admin = [keys for keys in (tokens, node.tenants.keys) if keys is not None]
        daemon.reloaded += admin
        if node.tenants.keys is not None:
            node.metrics.registry.register(KeyMetrics(node.tenants.keys))
        access = Access(names=None, admin=admin)
        self._api = ApiMiddleware(Router(routes), metrics=node.metrics, route=_route, access=access, bodies=node.bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        proxy = self._node.proxy
        if proxy is not None and scope["type"] == "http" and is_proxied(scope["path"]):
            await proxy(scope, receive, send)
        else:
            await self._api(scope, receive, send)

    def _not_ready(self) -> str:
        return self._daemon.not_ready() or self._node.not_ready()

    async def _why(self, request: Request) -> Response:
        """With an API key: a request of its tenant; with the admin token, or from this machine without a key: any."""
        tenant: str | None = None
        if not given_key(request.headers.raw) or self._node.tenants.open or request.scope["state"].get("admin"):
            check_local(request.scope)
        else:
            key = self._node.tenants.find(request.headers.raw)
            if key is None:
                raise ApiError(401, "an API key is required: Authorization: Bearer KEY", type="authentication_error")
            tenant = key.tenant
        proxy = self._node.proxy
        found = proxy.observers.requests.explain(request.path_params["name"], tenant) if proxy is not None else None
        if found is None:
            # The same for unknown requests and those of another tenant.
            raise ApiError(404, "no such request is known", type="not_found_error", code="no_such_request")
        import msgspec

        return Response(msgspec.json.encode(found), media_type="application/json")

    async def _drain(self, request: Request) -> Response:
        """Set what a backend is sent: ``/api/backends/NAME/all``, ``sessions`` or ``nothing``."""
        import msgspec

        check_local(request.scope)
        name, takes = request.path_params["name"], request.path_params["takes"]
        backend = self._node.backends.find(name)
        if backend is None:
            known = ", ".join(one.name for one in self._node.backends.all) or "none"
            raise ApiError(404, f"there is no backend {name[:80]!r}; known: {known}", type="not_found_error")
        try:
            backend.takes = msgspec.convert(takes, Takes)
        except msgspec.ValidationError:
            text = f"a backend takes {', '.join(TAKES)}, not {takes[:80]!r}"
            raise ApiError(404, text, type="not_found_error") from None
        log.info("what a backend is sent was set", extra={"backend": name, "takes": takes})
        return Response(msgspec.json.encode(backend.status()), media_type="application/json")

    def _status(self, request: Request) -> Response:  # not async: it waits for locks
        _check_reader(request)
        import msgspec

        body = self._node.status()
        body["state"] = self._not_ready() or "ready"
        return Response(msgspec.json.encode(body), media_type="application/json")


def _check_reader(request: Request) -> None:
    """Raise ApiError (403) for who is elsewhere and has no key that opens what reveals peers."""
    if not request.scope["state"].get("granted"):
        check_local(request.scope)


def _route(path: str) -> str:
    return "api" if path.startswith("/api/") else "probes"


def serve(settings: Settings, ready_file: Path | None = None) -> int:
    """Run the sidecar until a signal stops it; returns the exit code. Raises ConfigError and errors of opening.

    ``ready_file``: file for its address, in place of the one in the store's folder.
    """
    cloud = settings.cloud
    node = CloudNode(settings)
    file = ready_file or address_file(settings)
    daemon = Daemon(
        "cloud",
        host=cloud.host,
        port=cloud.port,
        drain=cloud.drain,
        linger=cloud.linger,
        receive=cloud.receive,
        certificate=certificate_of(cloud),
        address_file=file,
    )
    app: Any = Sidecar(node, daemon)
    print(f"ctxreuse-cloud listens on {daemon.bind()}", flush=True)
    return daemon.run(app, node.opened)
