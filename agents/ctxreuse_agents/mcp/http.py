"""The MCP server over streamable HTTP: many clients of one process, on this machine unless keys are required."""

from __future__ import annotations

import asyncio
import socket
import sys

import uvicorn
from mcp.server.transport_security import TransportSecuritySettings
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ctxreuse.config.hosts import is_loopback
from ctxreuse.daemon.keys import Keys, given_key
from ctxreuse.errors import ConfigError
from ctxreuse_agents.mcp.server import make_server
from ctxreuse_agents.mcp.share import CommonMemory

__all__ = ["run_http"]

#: Seconds for requests that are under way when the server ends.
_GRACE = 3


class _WithKeys:
    """Lets requests with a valid key through."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._keys.refresh()
            if self._keys.find(given_key(scope["headers"])) is None:
                refusal = JSONResponse({"error": "an API key is needed: Authorization: Bearer KEY"}, 401)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def run_http(shared: CommonMemory, toolsets: tuple[str, ...], host: str, port: int, key_file: str) -> None:
    """Serve until SIGTERM or SIGINT. ``port`` 0: a free one, which is said on standard error.

    Raises ConfigError for an address that cannot be had, or one of other machines without keys.
    """
    keys = Keys.from_setting(key_file)
    if not is_loopback(host) and keys is None:
        raise ConfigError(f"{host} can be reached from other machines", fix="Give --keys FILE, or use 127.0.0.1")
    security = None
    if keys is not None:  # a page that a user visits has no key
        security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app: ASGIApp = make_server(shared, toolsets).streamable_http_app(host=host, transport_security=security)
    if keys is not None:
        app = _WithKeys(app, keys)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}", fix="Give another --http") from None
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE)
    try:
        await shared.open()
        shown = f"[{host}]" if ":" in host else host
        print(f"MCP at http://{shown}:{listening.getsockname()[1]}/mcp", file=sys.stderr, flush=True)
        await uvicorn.Server(config).serve(sockets=[listening])
    finally:
        listening.close()
        await asyncio.shield(shared.close())
