"""From a request of the Messages API to messages and tools as the OpenAI API has them, and the ends of prefixes to keep
in these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ctxreuse.daemon.anthropic.requests import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    CacheControl,
    ContentBlock,
    CountTokensRequest,
)
from ctxreuse.daemon.openai import ApiError, ApiFunction, ApiToolCall, ChatMessage, ContentPart

__all__ = ["MAX_MARKS", "ChatParts", "Mark", "chat_parts", "tool_choice_of"]

#: Blocks with ``cache_control`` of a request at most.
MAX_MARKS = 4
#: Blocks of an assistant's past thoughts, which no prompt has.
_THOUGHTS = ("thinking", "redacted_thinking")
_NEW_LINE = ContentPart("text", "\n")


class Mark(NamedTuple):
    """The end of a prefix to keep for ``seconds``: behind so many ``parts`` of the message with this number, or, if
    that is None, of the tools."""

    message: int | None
    parts: int
    seconds: float


class ChatParts(NamedTuple):
    """What a request says, in the OpenAI API's words; ``marks`` in the order of the prompt."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    marks: list[Mark]


def chat_parts(body: CountTokensRequest) -> ChatParts:
    """Translate a request. Raises ApiError, naming the field, for what is not supported."""
    made = _Translation()
    tools = [made.tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())]
    if body.system:
        made.message(AnthropicMessage("system", body.system), "system")
    for number, message in enumerate(body.messages):
        made.message(message, f"messages[{number}]")
    if not made.messages or made.messages[-1].role == "assistant":
        text = "the last message is an assistant's, and an answer cannot be begun for the model here: end with a user's"
        raise ApiError(400, f"messages: {text}", param="messages")
    if body.cache_control is not None:
        made.mark(body.cache_control, "cache_control")
    _check(made.marks)
    return ChatParts(made.messages, tools, made.marks)


def tool_choice_of(given: AnthropicToolChoice | None) -> str | dict[str, Any] | None:
    """Return the OpenAI API's ``tool_choice``."""
    if given is None or given.type == "tool":
        return None if given is None else {"type": "function", "function": {"name": given.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[given.type]


def _check(marks: Sequence[Mark]) -> None:
    if len(marks) > MAX_MARKS:
        text = f"cache_control: at most {MAX_MARKS} blocks may have it, and here {len(marks)} do"
        raise ApiError(400, text, param="cache_control")
    if [mark.seconds for mark in marks] != sorted((mark.seconds for mark in marks), reverse=True):
        text = "cache_control: a block with ttl 1h must not come after one with 5m (tools, then system, then messages)"
        raise ApiError(400, text, param="cache_control")


class _Translation:
    """The messages so far."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.marks: list[Mark] = []
        self._tools = 0

    def tool(self, tool: AnthropicTool, where: str) -> dict[str, Any]:
        if tool.type not in (None, "custom"):
            text = f"{where}: the tool {tool.type[:64]!r} runs elsewhere; only tools with an input_schema are supported"
            raise ApiError(400, text, param=where)
        if tool.input_schema is None:
            raise ApiError(400, f"{where}.input_schema is missing", param=f"{where}.input_schema")
        self._tools += 1
        self.mark(tool.cache_control, where)
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema, "strict": bool(tool.strict)}
        if tool.description:
            function["description"] = tool.description
        return {"type": "function", "function": function}

    def message(self, message: AnthropicMessage, where: str) -> None:
        """Add a message; one after another of its role continues that."""
        where = where if where == "system" else f"{where}.content"
        content = message.content
        blocks = [ContentBlock("text", content)] if isinstance(content, str) else content
        if self.messages and self.messages[-1].role == message.role and blocks:
            self._extend(message.role, [_NEW_LINE])
        for number, block in enumerate(blocks):
            place = where if isinstance(content, str) else f"{where}[{number}]"
            if block.type == "tool_result" and message.role == "user":
                self._result(block, place)
            elif block.type == "tool_use" and message.role == "assistant":
                self._call(block, place)
            elif block.type not in _THOUGHTS:
                self._extend(message.role, [ContentPart("text", _text(block, place))])
            self.mark(block.cache_control, place)
        if not blocks:
            self._extend(message.role, [])

    def mark(self, control: CacheControl | None, where: str) -> None:
        """Keep the prefix up to here."""
        if control is None:
            return
        if not self.messages:
            mark = Mark(None, self._tools, control.seconds)
        else:
            content = self.messages[-1].content
            parts = len(content) if isinstance(content, list) else 1
            mark = Mark(len(self.messages) - 1, parts, control.seconds)
        # The automatic one may fall on a block that has one.
        if not self.marks or where != "cache_control" or self.marks[-1][:2] != mark[:2]:
            self.marks.append(mark)

    def _extend(self, role: str, parts: list[ContentPart]) -> None:
        if self.messages and self.messages[-1].role == role:
            last = self.messages[-1]
            assert isinstance(last.content, list)
            self.messages[-1] = msgspec.structs.replace(last, content=[*last.content, *parts])
        else:
            self.messages.append(ChatMessage(role, parts))

    def _call(self, block: ContentBlock, where: str) -> None:
        arguments = bytes(block.input).strip()
        if not arguments.startswith(b"{"):
            raise ApiError(400, f"{where}.input: an object is required", param=f"{where}.input")
        if not block.name:
            raise ApiError(400, f"{where}.name is missing", param=f"{where}.name")
        self._extend("assistant", [])
        last = self.messages[-1]
        call = ApiToolCall(ApiFunction(block.name, arguments.decode()), block.id)
        self.messages[-1] = msgspec.structs.replace(last, tool_calls=[*(last.tool_calls or ()), call])

    def _result(self, block: ContentBlock, where: str) -> None:
        parts = [ContentPart("text", text) for text in _texts(block.content, f"{where}.content")]
        if block.is_error:
            parts.insert(0, ContentPart("text", "error: "))
        self.messages.append(ChatMessage("tool", parts, tool_call_id=block.tool_use_id))


def _texts(content: str | list[ContentBlock] | None, where: str) -> list[str]:
    if content is None or isinstance(content, str):
        return [content] if content else []
    return [_text(block, f"{where}[{number}]") for number, block in enumerate(content)]


def _text(block: ContentBlock, where: str) -> str:
    """The text of a block. Raises ApiError for one that is none."""
    source = block.source
    if block.type == "text":
        return block.text
    if block.type == "search_result":
        head = [block.title, source if isinstance(source, str) else None]
        return _lines(head, _texts(block.content, f"{where}.content"))
    if block.type == "document":
        head = [block.title, block.context]
        if not isinstance(source, str) and source is not None and source.type == "text":
            return _lines(head, [source.data])
        if not isinstance(source, str) and source is not None and source.type == "content":
            return _lines(head, _texts(source.content, f"{where}.source.content"))
        what = "only documents of text are supported (source types text and content)"
        raise ApiError(400, f"{where}.source: {what}", param=f"{where}.source")
    raise ApiError(400, f"{where}: content of type {block.type[:64]!r} is not supported, only text is", param=where)


def _lines(head: Sequence[str | None], texts: Sequence[str]) -> str:
    """A document as one part, which is known again wherever it stands."""
    return "".join(f"{text}\n" for text in (*head, *texts) if text)
