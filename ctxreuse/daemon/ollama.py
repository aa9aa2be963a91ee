"""Ollama's API: requests and answers, as structs; unknown fields, ``think`` among them, are ignored and named."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Annotated, Any, Literal

import msgspec

from ctxreuse.daemon.openai import MAX_MESSAGES, ApiError, ApiFunction, ApiToolCall, ChatMessage

__all__ = [
    "OllamaAnswer",
    "OllamaCall",
    "OllamaChatRequest",
    "OllamaEmbedRequest",
    "OllamaEmbedding",
    "OllamaEmbeddings",
    "OllamaEmbeddingsRequest",
    "OllamaFunction",
    "OllamaGenerateRequest",
    "OllamaMessage",
    "OllamaModel",
    "OllamaModels",
    "OllamaOptions",
    "OllamaReply",
    "OllamaRequest",
    "ShowRequest",
    "chat_messages",
    "error_body",
]


class OllamaOptions(msgspec.Struct, frozen=True):
    """Sampling options, with Ollama's defaults; ``num_predict`` below 0: to the end of the context."""

    num_predict: int = -1
    seed: int | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.8
    top_k: int = 40
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repeat_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    stop: str | list[str] | None = None


class OllamaFunction(msgspec.Struct, frozen=True):
    """A function that is called; ``arguments``: an object."""

    name: str
    arguments: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))


class OllamaCall(msgspec.Struct, frozen=True):
    """A call of a tool."""

    function: OllamaFunction
    id: str = ""


class OllamaMessage(msgspec.Struct, frozen=True):
    """One message; ``tool_name``: whose result a tool's message is."""

    role: str
    content: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What requests for answers share; ``format``: ``json`` or a JSON schema of the answer."""

    model: str
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None
    keep_alive: str | int | float | None = None


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    """``POST /api/chat``; without messages the model is loaded, or with ``keep_alive`` 0 unloaded. ``tool_choice`` is
    the OpenAI API's: small models call no tool unless they must."""

    messages: Annotated[list[OllamaMessage], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    """``POST /api/generate``; ``raw``: the prompt is not put into the chat template."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    images: list[str] | None = None
    raw: bool | None = None


class ShowRequest(msgspec.Struct, frozen=True):
    """``POST /api/show``; ``name``: the field's older name."""

    model: str = ""
    name: str = ""


class OllamaReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The message of an answer, or a piece of it."""

    role: Literal["assistant"]
    content: str
    tool_calls: list[OllamaCall] | None = None


class OllamaAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of an answer: ``message`` in chats, ``response`` else; the last one has figures, durations in
    nanoseconds. ``prompt_eval_count``: tokens of the prompt, reused ones included."""

    model: str
    created_at: str
    done: bool | msgspec.UnsetType = msgspec.UNSET
    message: OllamaReply | None = None
    response: str | msgspec.UnsetType = msgspec.UNSET
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model in a list; ``digest``: of all that its KV depends on, "" before it was first loaded."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, Any]
    context_length: int | None = None


class OllamaModels(msgspec.Struct, frozen=True):
    """``GET /api/tags``, ``GET /api/ps``"""

    models: list[OllamaModel]


class OllamaEmbedRequest(msgspec.Struct, frozen=True):
    """``POST /api/embed``"""

    input: str | list[str]
    model: str = ""
    truncate: bool | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, frozen=True):
    """``POST /api/embeddings``, the older one, of one text."""

    prompt: str
    model: str = ""


class OllamaEmbeddings(msgspec.Struct, frozen=True):
    """A vector of each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    prompt_eval_count: int
    load_duration: int = 0


class OllamaEmbedding(msgspec.Struct, frozen=True):
    """The vector of a text."""

    embedding: list[float]


def chat_messages(messages: list[OllamaMessage]) -> list[ChatMessage]:
    """Return messages as the OpenAI API has them: calls get ids, and results those of the calls that they answer.

    Raises ApiError, naming the place, for what is not supported.
    """
    found: list[ChatMessage] = []
    waiting: dict[str, deque[str]] = defaultdict(deque)
    count = 0
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.images:
            raise ApiError(400, f"{where}.images: images are not supported, only text is", param=f"{where}.images")
        calls: list[ApiToolCall] = []
        for one in message.tool_calls or ():
            arguments = bytes(one.function.arguments).decode()
            # Nine letters and digits, which the templates of some models insist on.
            calls.append(ApiToolCall(ApiFunction(one.function.name, arguments), one.id or f"call{count:05d}"))
            waiting[one.function.name].append(calls[-1].id)
            count += 1
            if count > MAX_MESSAGES:
                raise ApiError(400, f"{where}.tool_calls: more than {MAX_MESSAGES:,} calls", param=where)
        answered = message.tool_call_id
        if message.role == "tool" and answered is None:
            name = message.tool_name or next((name for name, ids in waiting.items() if ids), "")
            answered = waiting[name].popleft() if waiting.get(name) else None
            if not waiting.get(name):
                waiting.pop(name, None)
        found.append(ChatMessage(message.role, message.content or "", message.tool_name, calls or None, answered))
    return found


def error_body(error: ApiError) -> bytes:
    """Return an error as ``{"error": TEXT}``."""
    return msgspec.json.encode({"error": error.message})
