"""Requests of the Messages API. As at the OpenAI door, unknown fields are ignored and named in a header of the answer;
``thinking`` is one of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ctxreuse.daemon.openai import MAX_MESSAGES, Extra

__all__ = [
    "AnthropicMessage",
    "AnthropicTool",
    "AnthropicToolChoice",
    "CacheControl",
    "ContentBlock",
    "CountTokensRequest",
    "DocumentSource",
    "MessagesRequest",
    "OutputConfig",
    "OutputFormat",
]


class CacheControl(msgspec.Struct, frozen=True):
    """Marks the end of a prefix to be kept for ``ttl`` after its last use."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        """``ttl`` in seconds."""
        return 300.0 if self.ttl == "5m" else 3600.0


class DocumentSource(msgspec.Struct, frozen=True):
    """Where a document's content is; of the types ``text`` (in ``data``) and ``content`` are supported."""

    type: str
    data: str = ""
    content: str | list[ContentBlock] | None = None


class ContentBlock(msgspec.Struct, frozen=True):
    """One block of content, with the fields of all supported types: ``text``, ``document``, ``search_result``,
    ``tool_use``, ``tool_result``. Blocks of thoughts are left out of the prompt."""

    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    tool_use_id: str = ""
    content: str | list[ContentBlock] | None = None
    is_error: bool = False
    source: DocumentSource | str | None = None
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None


class AnthropicMessage(msgspec.Struct, frozen=True):
    """One message; ``role``: user, assistant or system."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(msgspec.Struct, frozen=True):
    """A tool that the client runs; of the types of tools only ``custom`` is supported."""

    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(msgspec.Struct, frozen=True):
    """Which tools may be called: any number (``auto``), at least one (``any``), ``tool`` of this ``name``, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class OutputFormat(msgspec.Struct, frozen=True):
    """The JSON schema that the answer has."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """How the answer looks."""

    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/messages/count_tokens``"""

    messages: Annotated[list[AnthropicMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """``POST /v1/messages``; ``ctxreuse`` and ``priority`` as at the OpenAI door."""

    max_tokens: Annotated[int, msgspec.Meta(ge=0)]
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: int | None = None
    stream: bool | None = None
    priority: int = 0
    ctxreuse: Extra = Extra()
