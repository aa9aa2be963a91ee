"""The HTTP API: OpenAI's and Anthropic's under ``/v1``, our own and Ollama's under ``/api``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from ctxreuse.daemon.anthropic import answers as anthropic
from ctxreuse.daemon.ollama import error_body as ollama_error
from ctxreuse_edge.api import (
    contexts,
    documents,
    embeddings,
    forget,
    kv_hints,
    messages,
    ollama,
    openapi,
    responses,
    status,
    tokenizer,
    tokens,
    v1,
)

if TYPE_CHECKING:
    from ctxreuse.daemon.openai import ApiError
    from ctxreuse_edge.node import EdgeNode

__all__ = ["error_body", "routes"]


def routes(node: EdgeNode) -> list[Route]:
    """All routes but the probes."""
    return [
        route
        for module in (
            v1,
            messages,
            responses,
            ollama,
            embeddings,
            tokenizer,
            contexts,
            documents,
            forget,
            kv_hints,
            tokens,
            status,
            openapi,
        )
        for route in module.routes(node)
    ]


def error_body(error: ApiError, path: str, request: str) -> bytes:
    """Return the body of an error as the API that the path belongs to has it; ``request``: the request's id."""
    if path.startswith(messages.PATH):
        return anthropic.error_body(error, request)
    return ollama_error(error) if path in ollama.PATHS else error.body()
