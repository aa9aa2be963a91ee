"""The response object of ``/v1/responses`` and the items of its output."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ctxreuse.daemon.logprobs import TokenLogprob
from ctxreuse.daemon.openai import PromptDetails, usage_of
from ctxreuse.daemon.responses.request import ResponsesRequest
from ctxreuse.usage import Usage

__all__ = [
    "FunctionCall",
    "InputDetails",
    "OutputDetails",
    "OutputMessage",
    "OutputText",
    "ResponseFailure",
    "ResponseObject",
    "ResponseUsage",
    "response_usage",
]


class OutputText(msgspec.Struct, frozen=True):
    """The text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []
    type: Literal["output_text"] = "output_text"


class OutputMessage(msgspec.Struct, frozen=True):
    """A message of the answer."""

    id: str
    status: str
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class FunctionCall(msgspec.Struct, frozen=True):
    """A call of a function, which the client runs; ``arguments``: JSON as a text, cut in an incomplete one."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    type: Literal["function_call"] = "function_call"


class InputDetails(PromptDetails, frozen=True, kw_only=True):
    """Tokens of the input in detail: as of a chat's prompt, and how many were computed and are kept now."""

    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Tokens of the output in detail."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """What a response cost."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response: what was asked for, as far as the API tells it again, and its output."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    completed_at: int | None = None
    output: list[Any] = []
    error: ResponseFailure | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int = 0
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    truncation: str = "disabled"
    store: bool = True
    metadata: dict[str, str] = {}
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    reasoning: dict[str, None] = msgspec.field(default_factory=lambda: {"effort": None, "summary": None})
    service_tier: str = "default"
    background: bool = False
    usage: ResponseUsage | None = None
    object: Literal["response"] = "response"

    @classmethod
    def begun(cls, body: ResponsesRequest, id: str, model: str, created_at: int) -> ResponseObject:
        """The response to a request, before its answer."""
        given = {
            name: value
            for name in cls.__struct_fields__
            if name not in _OWN and (value := getattr(body, name, None)) is not None
        }
        if body.text is not None and body.text.format is not None:
            shown = msgspec.to_builtins(body.text.format)
            given["text"] = {"format": {name: value for name, value in shown.items() if value not in (None, "")}}
        else:
            given.pop("text", None)
        return cls(id=id, created_at=created_at, model=model, **given)


#: Fields that the answer decides, whatever the request says.
_OWN = ("id", "object", "created_at", "model", "status", "output", "error", "usage", "background", "reasoning")


def response_usage(usage: Usage) -> ResponseUsage:
    """A runtime's usage in the words of this API."""
    found = usage_of(usage)
    details = msgspec.to_builtins(found.prompt_tokens_details)
    computed = found.prompt_tokens - found.prompt_tokens_details.cached_tokens
    return ResponseUsage(
        found.prompt_tokens,
        InputDetails(**details, cache_write_tokens=computed),
        found.completion_tokens,
        OutputDetails(),
        found.total_tokens,
    )
