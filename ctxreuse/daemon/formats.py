"""Fields of requests that constrain an answer: OpenAI's ``response_format``, and vLLM's ``structured_outputs``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

__all__ = ["JsonSchema", "ResponseFormat", "StructuredOutputs"]


class JsonSchema(msgspec.Struct, frozen=True):
    """``schema`` is always enforced; unless ``strict``, keywords that cannot be enforced are ignored, not refused."""

    name: str = ""
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """``type``: ``text``, ``json_object``, or ``json_schema`` with the schema."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's field: one of a JSON schema, a regular expression, a list of texts, a grammar in Lark's notation, or
    ``json_object``."""

    json: dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1000)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
