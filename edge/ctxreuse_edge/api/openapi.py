"""The HTTP API described in OpenAPI 3.1, ``GET /openapi.json``, and as a page to read, ``GET /docs``.

The schemas are those of the structs that requests are parsed into; the page needs no script and nothing from elsewhere.
"""

from __future__ import annotations

from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import ctxreuse
from ctxreuse.daemon.anthropic.answers import MessageAnswer, TokensCount
from ctxreuse.daemon.anthropic.requests import CountTokensRequest, MessagesRequest
from ctxreuse.daemon.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from ctxreuse.daemon.ollama import (
    OllamaAnswer,
    OllamaChatRequest,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModels,
    ShowRequest,
)
from ctxreuse.daemon.openai import ChatCompletion, Completion, Model, ModelList
from ctxreuse.daemon.responses import ResponseObject
from ctxreuse.pauses.envelope import HintReport
from ctxreuse_edge.api.answers import json_answer
from ctxreuse_edge.api.chat import EdgeChatRequest
from ctxreuse_edge.api.contexts import NewContext
from ctxreuse_edge.api.documents import PlanRequest
from ctxreuse_edge.api.forget import ForgetRequest
from ctxreuse_edge.api.kv_hints import KvHintsRequest
from ctxreuse_edge.api.response_prompt import EdgeResponsesRequest
from ctxreuse_edge.api.tokenizer import DetokenizeRequest, TokenizeRequest
from ctxreuse_edge.api.tokens import TokensRequest
from ctxreuse_edge.api.v1 import EdgeCompletionRequest
from ctxreuse_edge.forget import Forgotten

if TYPE_CHECKING:
    from ctxreuse_edge.node import EdgeNode

__all__ = ["description", "routes"]


class _Operation(NamedTuple):
    """One method of a path; ``takes`` and ``gives``: the structs of its body and answer, None where prose says it."""

    method: str
    path: str
    summary: str
    takes: type[msgspec.Struct] | None = None
    gives: type[msgspec.Struct] | None = None


_OPERATIONS = (
    _Operation("POST", "/v1/chat/completions", "Answer a conversation", EdgeChatRequest, ChatCompletion),
    _Operation("POST", "/v1/completions", "Continue a text or token ids", EdgeCompletionRequest, Completion),
    _Operation("POST", "/v1/embeddings", "Vectors of texts", EmbeddingsRequest, EmbeddingsAnswer),
    _Operation("GET", "/v1/models", "The models that are served", None, ModelList),
    _Operation("GET", "/v1/models/{name}", "One model", None, Model),
    _Operation(
        "POST", "/v1/messages", "Answer a conversation, as Anthropic's API does", MessagesRequest, MessageAnswer
    ),
    _Operation("POST", "/v1/messages/count_tokens", "The length of its prompt", CountTokensRequest, TokensCount),
    _Operation("POST", "/v1/responses", "Answer a conversation, and keep it", EdgeResponsesRequest, ResponseObject),
    _Operation("POST", "/v1/responses/input_tokens", "The length of its prompt", EdgeResponsesRequest),
    _Operation("GET", "/v1/responses/{name}", "A stored response", None, ResponseObject),
    _Operation("DELETE", "/v1/responses/{name}", "Delete a stored response: its text and its KV"),
    _Operation("GET", "/v1/responses/{name}/input_items", "What a response answered: limit, order and after"),
    _Operation("POST", "/v1/responses/{name}/cancel", "Refused: no response is made in the background"),
    _Operation("POST", "/api/chat", "Answer a conversation, as Ollama does", OllamaChatRequest, OllamaAnswer),
    _Operation("POST", "/api/generate", "Answer a text, as Ollama does", OllamaGenerateRequest, OllamaAnswer),
    _Operation("POST", "/api/embed", "Vectors of texts, as Ollama gives them", OllamaEmbedRequest, OllamaEmbeddings),
    _Operation("POST", "/api/embeddings", "The vector of a text", OllamaEmbeddingsRequest, OllamaEmbedding),
    _Operation("GET", "/api/tags", "The models that are served, as Ollama lists them", None, OllamaModels),
    _Operation("GET", "/api/ps", "The models that are loaded, as Ollama lists them", None, OllamaModels),
    _Operation("POST", "/api/show", "One model, as Ollama describes it", ShowRequest),
    _Operation("GET", "/api/version", "The daemon's version"),
    _Operation("POST", "/tokenize", "A text or a conversation to token ids", TokenizeRequest),
    _Operation("POST", "/detokenize", "Token ids to text", DetokenizeRequest),
    _Operation("GET", "/api/contexts", "Named contexts: limit, offset and prefix of names in the query"),
    _Operation("POST", "/api/contexts", "Compute a context in advance, and name it", NewContext),
    _Operation("GET", "/api/contexts/{name}", "One context"),
    _Operation("DELETE", "/api/contexts/{name}", "Delete a context: its text and its KV"),
    _Operation("GET", "/api/contexts/{name}/export", "All that is kept of a context"),
    _Operation("POST", "/api/plan", "An order of requests and of their documents that shares most", PlanRequest),
    _Operation("POST", "/api/kv_hints", "What becomes of a context: KV hints alone", KvHintsRequest, HintReport),
    _Operation("POST", "/api/forget", "Delete what is kept of a chat", ForgetRequest, Forgotten),
    _Operation("POST", "/api/compact", "Rewrite the files: what was deleted is in none of them"),
    _Operation("POST", "/api/contexts/{name}/pin", "Keep a context's KV"),
    _Operation("POST", "/api/contexts/{name}/unpin", "Let a context's KV be evicted"),
    _Operation("GET", "/api/tokens/model", "The first model: its identity and where its files are"),
    _Operation("POST", "/api/tokens/complete", "Continue token ids: events with pieces of text and ids", TokensRequest),
    _Operation("POST", "/api/tokens/warm", "Compute token ids in advance", TokensRequest),
    _Operation("POST", "/api/tokens/forget", "Drop the KV of token ids", TokensRequest),
    _Operation("POST", "/api/tokens/pause", "A context pauses, for a reason and maybe for known seconds"),
    _Operation("POST", "/api/tokens/resume", "A context goes on soon"),
    _Operation("POST", "/api/tokens/hint", "What is known of a context's future"),
    _Operation("POST", "/api/tokens/supersede", "A context goes on from an earlier place"),
    _Operation("GET", "/api/why", "Why the last request of a session reused what it did"),
    _Operation("GET", "/api/why/{name}", "Why a request reused what it did"),
    _Operation("POST", "/api/sync", "Exchange blocks with the clouds now"),
    _Operation("GET", "/api/status", "The daemon's state"),
    _Operation("GET", "/api/events", "What the page shows: server-sent events of what changes"),
    _Operation("GET", "/openapi.json", "This description"),
    _Operation("GET", "/docs", "This description as a page"),
)
_HEAD = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>ctxreuse-edge</title><style>body{font:16px/1.5 sans-serif;"
    "max-width:60em;margin:2em auto;padding:0 1em}code{font-size:.9em}td{padding:0 1em 0 0;vertical-align:top}"
    "summary{cursor:pointer}</style><h1>ctxreuse-edge</h1>"
)


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    async def machine(_: Request) -> Response:
        return json_answer(description())

    async def page(_: Request) -> Response:
        headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return HTMLResponse(_page(description()), headers=headers)

    return [Route("/openapi.json", machine), Route("/docs", page)]


@cache
def description() -> dict[str, Any]:
    """Return the description as OpenAPI 3.1 has it."""
    structs = [one for each in _OPERATIONS for one in (each.takes, each.gives) if one is not None]
    found, parts = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(structs, found))
    paths: dict[str, dict[str, Any]] = {}
    for one in _OPERATIONS:
        answer: dict[str, Any] = {"description": "An answer"}
        if one.gives is not None:
            answer["content"] = {"application/json": {"schema": schemas[one.gives]}}
        refused = {"description": 'Refused: {"error": {"message", "type", "code", "param"}}'}
        operation: dict[str, Any] = {"summary": one.summary, "responses": {"200": answer, "4XX": refused}}
        if one.takes is not None:
            content = {"application/json": {"schema": schemas[one.takes]}}
            operation["requestBody"] = {"required": True, "content": content}
        if "{name}" in one.path:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        paths.setdefault(one.path, {})[one.method.lower()] = operation
    info = {"title": "ctxreuse-edge", "version": ctxreuse.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": parts}}


def _page(described: dict[str, Any]) -> str:
    schemas, parts = described["components"]["schemas"], [_HEAD]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h3><code>{method.upper()} {escape(path)}</code></h3><p>{escape(operation['summary'])}</p>")
            body = operation.get("requestBody")
            if body is not None:
                schema = schemas[_name(body["content"]["application/json"]["schema"])]
                parts.append(f"<details><summary>Fields of the body</summary>{_fields(schema)}</details>")
    parts.append("<h2>Objects</h2>")
    for name, schema in sorted(schemas.items()):
        text = escape(schema.get("description", ""))
        parts.append(f"<h3 id={escape(name)}><code>{escape(name)}</code></h3><p>{text}</p>{_fields(schema)}")
    return "".join(parts)


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code><td>{_kind(field)}<td>{'required' if name in required else ''}"
        for name, field in schema.get("properties", {}).items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _kind(field: dict[str, Any]) -> str:
    """The type of a field in a few words."""
    if "$ref" in field:
        name = escape(_name(field))
        return f"<a href=#{name}>{name}</a>"
    if "anyOf" in field:
        return " or ".join(_kind(one) for one in field["anyOf"])
    if field.get("type") == "array":
        return f"list of {_kind(field['items']) if field.get('items') else 'anything'}"
    if "enum" in field:
        return " or ".join(f"<code>{escape(str(one))}</code>" for one in field["enum"])
    bounds = [f"{sign} {field[key]}" for key, sign in _BOUNDS.items() if key in field]
    return escape(" ".join([str(field.get("type", "anything")), *bounds]))


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rsplit("/", 1)[-1]
