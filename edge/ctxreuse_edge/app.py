"""The daemon as one ASGI application, and how it is run."""

from __future__ import annotations

import logging
from pathlib import Path

from starlette.routing import Router

from ctxreuse.config import Settings
from ctxreuse.config.hosts import is_loopback
from ctxreuse.daemon.access import Access, host_names
from ctxreuse.daemon.bodies import BodyBudget
from ctxreuse.daemon.key_metrics import KeyMetrics
from ctxreuse.daemon.keys import Keys
from ctxreuse.daemon.lifecycle import Daemon
from ctxreuse.daemon.middleware import ApiMiddleware
from ctxreuse.daemon.page.routes import page_routes
from ctxreuse.daemon.probes import PROBES, probes
from ctxreuse.daemon.tls import certificate_of
from ctxreuse.engines import Engine
from ctxreuse.engines.process import EngineStart
from ctxreuse.errors import ConfigError
from ctxreuse_edge.api import error_body, ollama, routes
from ctxreuse_edge.node import EdgeNode
from ctxreuse_edge.page import edge_feed

__all__ = ["ADDRESS_FILE", "address_file", "application", "serve"]

log = logging.getLogger(__name__)

#: In the store's folder: address of the daemon that owns the store.
ADDRESS_FILE = "edge.json"

_ROUTES = (
    ("/v1/chat/completions", "chat"),
    ("/v1/completions", "completions"),
    ("/v1/embeddings", "embeddings"),
    ("/v1/messages", "messages"),
    ("/v1/models", "models"),
    ("/v1/responses", "responses"),
    ("/tokenize", "tokenizer"),
    ("/detokenize", "tokenizer"),
    ("/api/contexts", "contexts"),
    *((path, "ollama") for path in ollama.PATHS),
    ("/api/", "api"),
)


def address_file(settings: Settings) -> Path:
    """Return the file with the address of the daemon that runs with these settings."""
    return settings.store.folder() / ADDRESS_FILE


def serve(settings: Settings, engine: Engine | EngineStart | None = None) -> int:
    """Run the daemon until a signal stops it; returns the exit code. ``engine``: see `EdgeNode.opened`.

    Raises ConfigError, StoreOwnedError and errors of opening the engine.
    """
    edge, node = settings.edge, EdgeNode(settings)
    daemon = Daemon(
        "edge",
        host=edge.host,
        port=edge.port,
        drain=edge.drain,
        receive=edge.receive,
        certificate=certificate_of(edge),
        address_file=address_file(settings),
    )
    app = application(node, daemon)
    print(f"ctxreuse-edge listens on {daemon.bind()}", flush=True)
    return daemon.run(app, lambda: node.opened(engine))


def application(node: EdgeNode, daemon: Daemon) -> ApiMiddleware:
    """Return everything that is served over HTTP as one ASGI application.

    Raises ConfigError if other machines could use it without a key and ``edge.insecure`` is not set.
    """
    edge = node.settings.edge
    access = Access(
        keys=Keys.from_setting(edge.api_key_file),
        names=host_names(edge.host, edge.allowed_hosts),
        forwarded=edge.insecure,
        admin=[keys] if (keys := Keys.from_setting(edge.admin_token_file, ("admin",))) is not None else [],
    )
    daemon.reloaded += access.admin
    if access.keys is not None:
        daemon.reloaded.append(access.keys)
        node.metrics.registry.register(KeyMetrics(access.keys))
    if access.keys is None and not is_loopback(edge.host):
        if not edge.insecure:
            raise ConfigError(
                "beyond loopback the edge requires API keys",
                where=f"edge.host = {edge.host}",
                fix="Set edge.api_key_file, or edge.insecure = true on a network that you trust",
            )
        log.warning("anyone who reaches %s may use this daemon: edge.insecure is set", edge.host)
    page = page_routes(edge_feed(node, lambda: bool(daemon.not_ready())))
    return ApiMiddleware(
        Router([*probes(lambda: daemon.not_ready() or node.failing, node.metrics.exposition), *page, *routes(node)]),
        metrics=node.metrics,
        route=_route,
        not_ready=daemon.not_ready,
        access=access,
        bodies=BodyBudget(max(edge.max_bodies, 2 * edge.max_body), edge.receive),
        errors=error_body,
    )


def _route(path: str) -> str:
    found = next((name for prefix, name in _ROUTES if path.startswith(prefix)), "other")
    return "probes" if path in PROBES else found
