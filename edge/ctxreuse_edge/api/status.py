"""The state of the daemon, its clouds, and explanations of requests.

::

    GET  /api/status
    POST /api/sync              send clouds the blocks they miss, now
    GET  /api/why/ID            `ctxreuse.why.Why`; ID: header x-request-id, or "id" of the answer
    GET  /api/why?session=NAME  of the last request, of that session if given
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import ctxreuse
from ctxreuse.daemon.openai import ApiError
from ctxreuse.errors import SessionError
from ctxreuse.metrics import SOURCES
from ctxreuse_edge.api.answers import json_answer

if TYPE_CHECKING:
    from ctxreuse_edge.models import ServedModel
    from ctxreuse_edge.node import EdgeNode

__all__ = ["routes"]


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    def figures() -> dict[str, object]:
        runtime, metrics = node.runtime, node.metrics
        running, limit = node.pool.active, node.settings.edge.max_waiting
        disk = node.store.disk
        return {
            "version": ctxreuse.__version__,
            "pid": os.getpid(),
            "seconds": round(time.time() - node.since, 1),
            "model": {"id": node.models.first.name.id, "space": runtime.engine.space.digest.hex()},
            "store": {"path": str(node.settings.store.folder()), "durable": disk is not None}
            | {"stats": node.store.stats().fields(), "disk": disk.stats().fields() if disk is not None else {}},
            "engine": _engine(node.models.first),
            "models": [{"id": one.name.id, "running": one.running} | _engine(one) for one in node.models.served],
            "live": {"contexts": len(runtime.context_cache), "bytes": runtime.context_cache.nbytes}
            | {"levels": runtime.context_cache.levels()},
            "contexts": node.contexts.count(),
            "pinned": {"prefixes": len(node.pins), "bytes": node.pins.nbytes},
            "requests": {"running": running, "limit": limit, "held": running, "most": limit},  # held, most: 0.1.0
            "tokens": {source: int(metrics.read("ctxreuse_prompt_tokens_total", source)) for source in SOURCES},
            "clouds": node.links.status(),
        }

    async def status(_: Request) -> Response:
        return json_answer(await node.pool.call(figures))

    async def sync(request: Request) -> Response:
        return json_answer(await node.pool.call(node.links.sync))

    async def why(request: Request) -> Response:
        name, session = request.path_params.get("name", ""), request.query_params.get("session", "")
        # Without API keys all who may ask are programs of this device's user.
        others = request.scope["state"].get("admin", False) or not node.settings.edge.api_key_file
        try:
            found = await node.pool.call(lambda: node.runtime.why(name, session=session, others=others))
        except SessionError as error:
            raise ApiError(404, str(error), type="not_found_error", code="no_such_request") from None
        return json_answer(found)

    return [
        Route("/api/status", status),
        Route("/api/sync", sync, methods=["POST"]),
        Route("/api/why", why),
        Route("/api/why/{name:path}", why),
    ]


def _engine(model: ServedModel) -> dict[str, object]:
    """The state of a model's engine; ``pid`` 0: it runs in the daemon's own process, or not at present."""
    child = model.child
    if child is None:
        return {"state": "up" if model.loaded else "unloaded", "pid": 0, "restarts": 0, "error": "", "bytes": 0}
    state, restarts = child.state, child.restarts
    return {"state": state, "pid": child.pid, "restarts": restarts, "error": child.failing, "bytes": child.memory}
