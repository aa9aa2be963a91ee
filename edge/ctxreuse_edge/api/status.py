"""``GET /api/status`` and ``/api/sync``: how the daemon stands, and its clouds."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import ctxreuse
from ctxreuse.metrics import SOURCES
from ctxreuse_edge.api.answers import json_answer

if TYPE_CHECKING:
    from ctxreuse_edge.node import Node

__all__ = ["routes"]


def routes(node: Node) -> list[Route]:
    """The routes of this module."""

    def figures() -> dict[str, object]:
        runtime, metrics = node.runtime, node.metrics
        return {
            "version": ctxreuse.__version__,
            "pid": os.getpid(),
            "seconds": round(time.time() - node.since, 1),
            "model": {"id": node.model.id, "space": runtime.engine.space.digest.hex()},
            "store": {"path": str(node.settings.store.folder()), "durable": node.store.disk is not None}
            | {"stats": node.store.stats()},
            "live": {"contexts": len(runtime.pool), "bytes": runtime.pool.nbytes},
            "contexts": node.contexts.count(),
            "requests": {"held": node.worker.held, "most": node.settings.edge.max_waiting},
            "tokens": {source: int(metrics.read("ctxreuse_prompt_tokens_total", source)) for source in SOURCES},
            "clouds": node.links.status(),
        }

    async def status(_: Request) -> Response:
        return json_answer(await node.worker.call(figures))

    async def sync(request: Request) -> Response:
        return json_answer(await node.worker.call(node.links.sync))

    return [Route("/api/status", status), Route("/api/sync", sync, methods=["POST"])]
