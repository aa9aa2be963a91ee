"""The OpenAI API's words: requests, answers, streamed chunks and errors, as structs.

Unknown fields of a request are left alone, as clients send new ones each month; a known field of a wrong type or out
of its range is refused with its name. `usage` says besides the usual counts how many prompt tokens came from where.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from ctxreuse.engines.text import Message
from ctxreuse.errors import (
    ConfigError,
    ContextTooLongError,
    CtxReuseError,
    EngineError,
    LinkError,
    SessionError,
    StoreError,
    TokenRangeError,
)
from ctxreuse.metrics import SOURCES, Spent

__all__ = [
    "DONE",
    "ApiError",
    "ChatChoice",
    "ChatChunk",
    "ChatCompletion",
    "ChatMessage",
    "ChatRequest",
    "ChunkChoice",
    "Completion",
    "CompletionChoice",
    "CompletionRequest",
    "Delta",
    "Model",
    "ModelList",
    "Part",
    "PromptDetails",
    "Reply",
    "SamplingFields",
    "StreamOptions",
    "Usage",
    "api_error",
    "event",
    "parse",
    "usage_of",
]

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_Whole = Annotated[int, msgspec.Meta(ge=0)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class ApiError(Exception):
    """A request's refusal: HTTP ``status`` and the body that OpenAI clients read. Never leaves the HTTP server."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.code, self.param = status, message, type, code, param
        self.retry_after = retry_after

    def body(self) -> bytes:
        """``{"error": {"message", "type", "code", "param"}}``"""
        error = {"message": self.message, "type": self.type, "code": self.code, "param": self.param}
        return msgspec.json.encode({"error": error})


def api_error(error: CtxReuseError) -> ApiError:
    """The refusal that an error means to a client."""
    text = str(error)
    if isinstance(error, ContextTooLongError):
        return ApiError(400, text, code="context_length_exceeded", param="messages")
    if isinstance(error, TokenRangeError):
        return ApiError(400, text, code="token_out_of_range", param="prompt")
    if isinstance(error, SessionError):
        return ApiError(404, text, type="not_found_error", code="no_such_context")
    if isinstance(error, EngineError | ConfigError):
        return ApiError(400, text)
    if isinstance(error, StoreError):
        return ApiError(503, text, type="server_error", code="store")
    if isinstance(error, LinkError):
        return ApiError(502, text, type="server_error", code="link")
    return ApiError(500, text, type="server_error")


# Requests


class Part(msgspec.Struct, frozen=True):
    """One part of a message's content; only ``text`` can be answered here."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    """One message; ``content`` is text, a list of parts, or nothing (a call of tools)."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None

    def text(self, where: str = "messages") -> str:
        """The content as one text. Raises ApiError for parts that are not text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                raise ApiError(400, f"content of type {part.type!r} is not supported, only text is", param=where)
        return "".join(part.text for part in self.content)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Characters of `text` at which parts of the content end."""
        return tuple(accumulate(len(part.text) for part in self.content)) if isinstance(self.content, list) else ()

    def message(self, where: str = "messages") -> Message:
        """As an engine takes it. Raises ApiError for parts that are not text."""
        return Message(self.role, self.text(where), self.name, self.cuts)


class StreamOptions(msgspec.Struct, frozen=True):
    """``include_usage``: a last chunk without choices says what it cost."""

    include_usage: bool = False


class Extra(msgspec.Struct, frozen=True):
    """What is ours in a request. ``lossy``: the worst level of KV that may be reused for it, such as ``kl-0.01``; "":
    exact only; None: as the daemon's settings say."""

    lossy: str | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of request say about how to answer; defaults are the OpenAI API's."""

    model: str = ""
    max_tokens: _Whole | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ctxreuse: Extra = Extra()

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``"""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_completion_tokens: _Whole | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """``POST /v1/completions``; ``prompt`` is a text, token ids, or a list of either."""

    prompt: str | list[Any]
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    suffix: str | None = None


_AT = re.compile(r"^(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)


def parse(body: bytes, kind: type[T]) -> T:
    """A request's body as a struct. Raises ApiError (400) that names the field which is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        text, param = found.groups() if found else (str(error), None)
        missing = re.search(r"missing required field `(\w+)`", text)
        if missing and not param:
            param = missing[1]
        raise ApiError(400, f"{param}: {text}" if param else text, param=param or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


# Answers


class PromptDetails(msgspec.Struct, frozen=True):
    """``cached_tokens`` were reused; ``sources``: all prompt tokens by where their KV came from. ``levels``: the reused
    ones by the level of their KV; ``approx``: something lossy is in what was answered from. ``missed``: why the first
    whole block that had to be computed was ("": none had to); ``GET /api/why/ID`` says more. ``moved``: of the reused
    tokens those that stood elsewhere when they were computed; ``mended``: how many more were moved and computed again;
    ``gate``: what was said of moving ("": there was nothing to move)."""

    cached_tokens: int = 0
    sources: dict[str, int] = {}
    levels: dict[str, int] = {}
    approx: bool = False
    missed: str = ""
    moved: int = 0
    mended: int = 0
    gate: str = ""


class Usage(msgspec.Struct, frozen=True):
    """What a request cost; prompt_tokens is the sum of ``prompt_tokens_details.sources``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()


def usage_of(spent: Spent) -> Usage:
    """A runtime's usage in the API's words."""
    sources = dict.fromkeys(SOURCES, 0) | spent.by_source
    sources["compute"] += spent.prompt_tokens - spent.cached_tokens
    return Usage(
        spent.prompt_tokens,
        spent.completion_tokens,
        spent.prompt_tokens + spent.completion_tokens,
        PromptDetails(
            spent.cached_tokens,
            sources,
            spent.by_level,
            spent.approx,
            spent.why or spent.missed,
            spent.moved,
            spent.mended,
            spent.gate,
        ),
    )


class Reply(msgspec.Struct, frozen=True):
    """The message of an answer."""

    content: str
    role: str = "assistant"


class ChatChoice(msgspec.Struct, frozen=True):
    message: Reply
    finish_reason: str
    index: int = 0
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str = ""
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One streamed event; ``usage`` stands in every chunk if it was asked for, null but in the last."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChoice(msgspec.Struct, frozen=True):
    text: str
    finish_reason: str | None
    index: int = 0
    logprobs: None = None


class Completion(msgspec.Struct, frozen=True):
    """An answer of /v1/completions, whole or as a streamed event."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["text_completion"] = "text_completion"


class Model(msgspec.Struct, frozen=True):
    """One model, with what clients of other local servers look for."""

    id: str
    created: int
    max_model_len: int
    owned_by: str = "ctxreuse"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


def event(data: Any) -> bytes:
    """One server-sent event with ``data`` as JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
