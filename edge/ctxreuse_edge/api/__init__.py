"""The HTTP API: OpenAI's and Anthropic's under ``/v1``, our own under ``/api``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from ctxreuse.daemon.anthropic import answers as anthropic
from ctxreuse_edge.api import contexts, forget, messages, openapi, responses, status, tokenizer, tokens, v1

if TYPE_CHECKING:
    from ctxreuse.daemon.openai import ApiError
    from ctxreuse_edge.node import EdgeNode

__all__ = ["error_body", "routes"]


def routes(node: EdgeNode) -> list[Route]:
    """All routes but the probes."""
    return [
        route
        for module in (v1, messages, responses, tokenizer, contexts, forget, tokens, status, openapi)
        for route in module.routes(node)
    ]


def error_body(error: ApiError, path: str, request: str) -> bytes:
    """Return the body of an error as the API that the path belongs to has it; ``request``: the request's id."""
    return anthropic.error_body(error, request) if path.startswith(messages.PATH) else error.body()
