"""The HTTP API: OpenAI's words under ``/v1``, our own under ``/api``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from ctxreuse_edge.api import chat, completions, contexts, models, pauses, status, tokens, why

if TYPE_CHECKING:
    from ctxreuse_edge.node import Node

__all__ = ["routes"]


def routes(node: Node) -> list[Route]:
    """All routes that need an engine."""
    return [
        module_route
        for module in (chat, completions, models, contexts, tokens, pauses, status, why)
        for module_route in module.routes(node)
    ]
