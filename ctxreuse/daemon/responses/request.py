"""Requests to ``POST /v1/responses``, and their fields as a chat request has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ctxreuse.daemon.formats import JsonSchema, ResponseFormat
from ctxreuse.daemon.openai import MAX_MESSAGES, ApiError, Extra

__all__ = ["LOGPROBS", "InputItem", "InputPart", "ResponsesRequest", "TextConfig", "TextFormat", "chat_fields"]

#: The one thing of ``include`` that models here can give.
LOGPROBS = "message.output_text.logprobs"
#: Others mean tools or modes that are not here: there is never any of it to include.
_INCLUDES = (
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)

_DAY = 86_400.0
_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]


class InputPart(msgspec.Struct, frozen=True):
    """A part of an item's content; only texts are supported."""

    type: str
    text: str = ""
    refusal: str = ""
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(msgspec.Struct, frozen=True):
    """One item of the input: a message, a call of a function, or its output; which fields it has depends on it."""

    type: str = "message"
    role: str = ""
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[InputPart] | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """``type``: ``text``, ``json_object``, or ``json_schema`` with the schema."""

    type: str = "text"
    name: str = ""
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """What the answer's text looks like."""

    format: TextFormat | None = None
    verbosity: str | None = None


class CacheOptions(msgspec.Struct, frozen=True):
    """``ttl``: how long the KV of the prompt is kept at least."""

    ttl: Literal["30m", "12h"] | None = None
    mode: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/responses``; ``previous_response_id``: the stored response that it continues, without the
    instructions of that one. ``ctxreuse`` and ``priority``: as in a chat request."""

    input: str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_MESSAGES)]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    priority: int = 0
    ctxreuse: Extra = Extra()

    @property
    def stored(self) -> bool:
        """True if the response is to be found again."""
        return self.store is not False

    @property
    def kept_seconds(self) -> float:
        """How long KV is to be kept after its last use; 0: as long as there is room."""
        least = self.prompt_cache_options.ttl if self.prompt_cache_options is not None else None
        day = _DAY if self.prompt_cache_retention == "24h" else 0.0
        return max(day, {"30m": 1800.0, "12h": _DAY / 2}.get(least or "", 0.0))

    @property
    def wants_logprobs(self) -> bool:
        """True if the text comes with log-probabilities."""
        return LOGPROBS in (self.include or ())


def chat_fields(body: ResponsesRequest) -> dict[str, Any]:
    """The request's fields, without its input, as those of a chat request. Raises ApiError for what is not here."""
    _refuse(body)
    return {
        "model": body.model,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_completion_tokens": body.max_output_tokens,
        "stream": body.stream,
        "priority": body.priority,
        "ctxreuse": body.ctxreuse,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "tools": [_tool(one, f"tools[{i}]") for i, one in enumerate(body.tools or ())] or None,
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body.text.format) if body.text is not None else None,
    }


def _refuse(body: ResponsesRequest) -> None:
    if body.conversation is not None:
        what = "conversation: there are none here; continue a response with previous_response_id"
        raise ApiError(400, what, param="conversation", code="unsupported_parameter")
    if body.prompt is not None:
        what = "prompt: no templates are kept here; send instructions and input"
        raise ApiError(400, what, param="prompt", code="unsupported_parameter")
    if body.background:
        what = "background: responses are not made in the background here; stream it, or wait for the answer"
        raise ApiError(400, what, param="background", code="unsupported_parameter")
    unknown = next((one for one in body.include or () if one not in _INCLUDES), None)
    if unknown is not None:
        raise ApiError(400, f"include: {unknown[:80]!r} is not known", param="include")
    if body.top_logprobs and not body.wants_logprobs:
        raise ApiError(400, f"top_logprobs needs {LOGPROBS!r} in include", param="top_logprobs")


def _tool(given: dict[str, Any], place: str) -> dict[str, Any]:
    """A tool as chat requests have it; there its fields that are null are left out."""
    kind = given.get("type", "function")
    if kind != "function":
        what = f"{place}.type: {str(kind)[:64]!r} is not here; only functions are, which the client runs"
        raise ApiError(400, what, param=f"{place}.type", code="unsupported_parameter")
    function = {name: given[name] for name in ("name", "description", "parameters", "strict") if given.get(name)}
    return {"type": "function", "function": function}


def _choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        what = f"tool_choice.type: {str(given.get('type'))[:64]!r} is not here; use auto, required, none or a function"
        raise ApiError(400, what, param="tool_choice")
    return {"type": "function", "function": {"name": given.get("name")}}


def _format(given: TextFormat | None) -> ResponseFormat | None:
    if given is None:
        return None
    if given.type != "json_schema":
        return ResponseFormat(given.type)
    return ResponseFormat(given.type, JsonSchema(given.name, given.schema, given.strict, given.description))
