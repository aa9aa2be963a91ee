"""The OpenAI API's embeddings: requests and answers, as structs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

__all__ = ["MAX_TEXTS", "Embedding", "EmbeddingsAnswer", "EmbeddingsRequest", "EmbeddingsUsage"]

#: Texts of a request at most.
MAX_TEXTS = 2048


class EmbeddingsRequest(msgspec.Struct, frozen=True):
    """``POST /v1/embeddings``; ``input``: a text or several. ``dimensions``: shorter vectors."""

    input: str | Annotated[list[Any], msgspec.Meta(min_length=1, max_length=MAX_TEXTS)]
    model: str = ""
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None


class Embedding(msgspec.Struct, frozen=True):
    """The vector of a text; in base64: float32, little-endian."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(msgspec.Struct, frozen=True):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(msgspec.Struct, frozen=True):
    """The vectors, in the order of the texts."""

    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"
