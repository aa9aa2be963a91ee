"""From a request of the Messages API to messages and tools as the OpenAI API has them, and the ends of prefixes to keep
in these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ctxreuse.daemon.anthropic.requests import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    CacheControl,
    ContentBlock,
    CountTokensRequest,
)
from ctxreuse.daemon.openai import MAX_MESSAGES, ApiError, ApiFunction, ApiToolCall, ChatMessage, ContentPart

__all__ = ["MAX_MARKS", "ChatParts", "Mark", "chat_parts", "tool_choice_of"]

#: Blocks with ``cache_control`` of a request at most.
MAX_MARKS = 4
#: Blocks of an assistant's past thoughts, which no prompt has.
_THOUGHTS = ("thinking", "redacted_thinking")
#: A text in a document in a result.
_DEPTH = 2
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
    if not made.drafts or made.drafts[-1].role == "assistant":
        text = "the last message is an assistant's, and an answer cannot be begun for the model here: end with a user's"
        raise ApiError(400, f"messages: {text}", param="messages")
    if body.cache_control is not None:
        made.mark(body.cache_control, "cache_control")
    _check(made.marks)
    return ChatParts([draft.message for draft in made.drafts], tools, made.marks)


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


class _Draft:
    """A message in the making: many blocks may belong to it."""

    def __init__(self, role: str, call_id: str | None = None) -> None:
        self.role, self._call_id = role, call_id
        self.parts: list[ContentPart] = []
        self.calls: list[ApiToolCall] = []

    @property
    def message(self) -> ChatMessage:
        return ChatMessage(self.role, self.parts, None, self.calls or None, self._call_id)


class _Translation:
    """The messages so far."""

    def __init__(self) -> None:
        self.drafts: list[_Draft] = []
        self.marks: list[Mark] = []
        self._tools = self._blocks = 0

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
        if self.drafts and self.drafts[-1].role == message.role and blocks:
            self.drafts[-1].parts.append(_NEW_LINE)
        for number, block in enumerate(blocks):
            place = where if isinstance(content, str) else f"{where}[{number}]"
            if block.type == "tool_result" and message.role == "user":
                self._count(place)
                self._result(block, place)
            elif block.type == "tool_use" and message.role == "assistant":
                self._count(place)
                self._call(block, place)
            elif block.type not in _THOUGHTS:
                self._of(message.role).parts.append(ContentPart("text", _text(block, place)))
            self.mark(block.cache_control, place)
        if not blocks:
            self._of(message.role)

    def mark(self, control: CacheControl | None, where: str) -> None:
        """Keep the prefix up to here."""
        if control is None:
            return
        mark = Mark(None, self._tools, control.seconds)
        if self.drafts:
            mark = Mark(len(self.drafts) - 1, len(self.drafts[-1].parts), control.seconds)
        # The automatic one may fall on a block that has one.
        if not self.marks or where != "cache_control" or self.marks[-1][:2] != mark[:2]:
            self.marks.append(mark)

    def _count(self, where: str) -> None:
        """Raise ApiError for more calls and results than there may be messages."""
        self._blocks += 1
        if self._blocks > MAX_MESSAGES:
            raise ApiError(400, f"{where}: more than {MAX_MESSAGES:,} calls and results of tools", param=where)

    def _of(self, role: str) -> _Draft:
        """The last message, if it is of that role, else a new one."""
        if not self.drafts or self.drafts[-1].role != role:
            self.drafts.append(_Draft(role))
        return self.drafts[-1]

    def _call(self, block: ContentBlock, where: str) -> None:
        arguments = bytes(block.input).strip()
        if not arguments.startswith(b"{"):
            raise ApiError(400, f"{where}.input: an object is required", param=f"{where}.input")
        if not block.name:
            raise ApiError(400, f"{where}.name is missing", param=f"{where}.name")
        self._of("assistant").calls.append(ApiToolCall(ApiFunction(block.name, arguments.decode()), block.id))

    def _result(self, block: ContentBlock, where: str) -> None:
        result = _Draft("tool", block.tool_use_id)
        result.parts = [ContentPart("text", text) for text in _texts(block.content, f"{where}.content")]
        if block.is_error:
            result.parts.insert(0, ContentPart("text", "error: "))
        self.drafts.append(result)


def _texts(content: str | list[ContentBlock] | None, where: str, depth: int = 1) -> list[str]:
    if content is None or isinstance(content, str):
        return [content] if content else []
    return [_text(block, f"{where}[{number}]", depth) for number, block in enumerate(content)]


def _text(block: ContentBlock, where: str, depth: int = 0) -> str:
    """The text of a block, which is in so many others. Raises ApiError for one that is none."""
    source = block.source
    if depth > _DEPTH:
        raise ApiError(400, f"{where}: blocks are in each other more than {_DEPTH} deep", param=where)
    if block.type == "text":
        return block.text
    if block.type == "search_result":
        head = [block.title, source if isinstance(source, str) else None]
        return _lines(head, _texts(block.content, f"{where}.content", depth + 1))
    if block.type == "document":
        head = [block.title, block.context]
        if not isinstance(source, str) and source is not None and source.type == "text":
            return _lines(head, [source.data])
        if not isinstance(source, str) and source is not None and source.type == "content":
            return _lines(head, _texts(source.content, f"{where}.source.content", depth + 1))
        what = "only documents of text are supported (source types text and content)"
        raise ApiError(400, f"{where}.source: {what}", param=f"{where}.source")
    raise ApiError(400, f"{where}: content of type {block.type[:64]!r} is not supported, only text is", param=where)


def _lines(head: Sequence[str | None], texts: Sequence[str]) -> str:
    """A document as one part, which is known again wherever it stands."""
    return "".join(f"{text}\n" for text in (*head, *texts) if text)
