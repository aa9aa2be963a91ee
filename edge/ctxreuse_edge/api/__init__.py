"""The HTTP API: OpenAI-compatible under ``/v1``, our own under ``/api``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from ctxreuse_edge.api import contexts, forget, openapi, status, tokenizer, tokens, v1

if TYPE_CHECKING:
    from ctxreuse_edge.node import EdgeNode

__all__ = ["routes"]


def routes(node: EdgeNode) -> list[Route]:
    """All routes but the probes."""
    return [
        route for module in (v1, tokenizer, contexts, forget, tokens, status, openapi) for route in module.routes(node)
    ]
