"""Vectors of texts: ``/v1/embeddings``, and Ollama's ``/api/embed`` and ``/api/embeddings``.

They are made by the embedder of the extra ``embed``, not by the models that answer; see `ctxreuse.embed`.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.embeddings import MAX_TEXTS, Embedding, EmbeddingsAnswer, EmbeddingsRequest, EmbeddingsUsage
from ctxreuse.daemon.middleware import spend
from ctxreuse.daemon.ollama import (
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)
from ctxreuse.daemon.openai import ApiError
from ctxreuse.embed import NAME
from ctxreuse_edge.api.answers import body_of, json_answer

if TYPE_CHECKING:
    from ctxreuse.embed import Embedder, Embeddings
    from ctxreuse_edge.node import EdgeNode

__all__ = ["routes", "texts_of"]

_NAMES = ("", "default", NAME, f"{NAME}:latest")


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    async def embedded(
        request: Request, model: str, texts: Sequence[str], dimensions: int | None, *, cut: bool
    ) -> Embeddings:
        if model not in _NAMES:
            text = f"the model {model!r} makes no embeddings here; there is {NAME!r}"
            raise ApiError(404, text, type="not_found_error", code="model_not_found", param="model")
        if len(texts) > MAX_TEXTS:
            raise ApiError(400, f"input: at most {MAX_TEXTS:,} texts are taken", param="input")
        found = await node.pool.call(_work(node, texts, dimensions))
        spend(request.scope, sum(found.tokens))
        longest = node.embedder.max_tokens
        long = next((number for number, count in enumerate(found.tokens) if count > longest), None)
        if long is not None and not cut:
            text = f"input[{long}] has more than {longest:,} tokens"
            raise ApiError(400, text, code="context_length_exceeded", param="input")
        return found

    async def openai(request: Request) -> Response:
        body = await body_of(request, node, EmbeddingsRequest)
        texts = texts_of(body.input)
        found = await embedded(request, body.model, texts, body.dimensions, cut=False)
        rows: list[Any] = found.vectors.tolist()
        if body.encoding_format == "base64":
            rows = [b64encode(row.astype("<f4").tobytes()).decode() for row in found.vectors]
        data = [Embedding(index, row) for index, row in enumerate(rows)]
        count = sum(found.tokens)
        return json_answer(EmbeddingsAnswer(data, NAME, EmbeddingsUsage(count, count)))

    async def ollama(request: Request) -> Response:
        body, began = await body_of(request, node, OllamaEmbedRequest), time.perf_counter_ns()
        texts = [body.input] if isinstance(body.input, str) else body.input
        found = await embedded(request, body.model, texts, body.dimensions, cut=body.truncate is not False)
        took = time.perf_counter_ns() - began
        return json_answer(OllamaEmbeddings(NAME, found.vectors.tolist(), took, sum(found.tokens)))

    async def older(request: Request) -> Response:
        body = await body_of(request, node, OllamaEmbeddingsRequest)
        found = await embedded(request, body.model, [body.prompt], None, cut=True)
        return json_answer(OllamaEmbedding(found.vectors[0].tolist()))

    return [
        Route("/v1/embeddings", openai, methods=["POST"]),
        Route("/api/embed", ollama, methods=["POST"]),
        Route("/api/embeddings", older, methods=["POST"]),
    ]


def _work(node: EdgeNode, texts: Sequence[str], dimensions: int | None) -> Callable[[], Embeddings]:
    def work() -> Embeddings:
        embedder: Embedder = node.embedder
        if dimensions is not None and dimensions > embedder.dimensions:
            text = f"dimensions: the vectors have {embedder.dimensions} numbers, and {dimensions} are wanted"
            raise ApiError(400, text, param="dimensions")
        return embedder.embed(texts, dimensions=dimensions)

    return work


def texts_of(given: str | list[Any]) -> list[str]:
    """Return the texts of the OpenAI API's ``input``. Raises ApiError, naming the place."""
    texts = [given] if isinstance(given, str) else given
    for number, text in enumerate(texts):
        where = "input" if isinstance(given, str) else f"input[{number}]"
        if isinstance(text, int | list):
            what = "token ids are those of another model's tokenizer: send texts"
            langchain = "in LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)"
            raise ApiError(400, f"{where}: {what} ({langchain})", param="input")
        if not isinstance(text, str) or not text:
            raise ApiError(400, f"{where}: a text that is not empty is required", param="input")
    return texts
