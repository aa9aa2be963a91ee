"""Answers of the Messages API: messages, the events that a stream of one has, and errors."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from ctxreuse.daemon.openai import ApiError

__all__ = [
    "AnthropicUsage",
    "CacheCreation",
    "EndDelta",
    "MessageAnswer",
    "MessageEvent",
    "StopReason",
    "TextBlock",
    "TokensCount",
    "ToolUseBlock",
    "error_body",
    "named_event",
]

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

#: The type of an error by its status.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class CacheCreation(msgspec.Struct, frozen=True):
    """``cache_creation_input_tokens`` by their time."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class AnthropicUsage(msgspec.Struct, frozen=True):
    """What a request cost: tokens of the prompt that were reused, computed and kept for their time, and computed
    besides; together they are the prompt."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation: CacheCreation = CacheCreation()


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of a tool in an answer; ``input``: its arguments."""

    id: str
    name: str
    input: Any


class MessageAnswer(msgspec.Struct, frozen=True):
    """An answer, whole or as it begins; ``stop_sequence``: the one that ended it."""

    id: str
    model: str
    usage: AnthropicUsage
    content: list[TextBlock | ToolUseBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class EndDelta(msgspec.Struct, frozen=True):
    """Why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of a stream: ``message_start``, ``content_block_start``, ``content_block_delta``,
    ``content_block_stop``, ``message_delta`` or ``message_stop``, each with some of the fields."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    index: int | msgspec.UnsetType = msgspec.UNSET
    message: MessageAnswer | None = None
    content_block: TextBlock | ToolUseBlock | None = None
    delta: dict[str, str] | EndDelta | None = None
    usage: AnthropicUsage | None = None


class TokensCount(msgspec.Struct, frozen=True):
    """The length of a prompt."""

    input_tokens: int


def named_event(value: MessageEvent) -> bytes:
    """Return a server-sent event, named by its type."""
    return b"event: " + value.type.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


def error_body(error: ApiError, request_id: str) -> bytes:
    """Return an error as ``{"type": "error", "error": {"type", "message"}, "request_id"}``."""
    text = error.message
    if error.code == "context_length_exceeded":
        text = f"prompt is too long: {text}"  # what clients look for, to shorten it by themselves
    found = {"type": _TYPES.get(error.status, "api_error"), "message": text}
    return msgspec.json.encode({"type": "error", "error": found, "request_id": request_id})
