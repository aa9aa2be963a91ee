"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``.

``cache_control`` pins the prefix that it ends, for its time after each use, with all other prompts that begin alike;
what is reused without it counts as read from the cache, too. The usage adds up to the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.anthropic.answers import (
    AnthropicUsage,
    CacheCreation,
    EndDelta,
    MessageAnswer,
    MessageEvent,
    StopReason,
    TextBlock,
    TokensCount,
    ToolUseBlock,
    error_body,
    named_event,
)
from ctxreuse.daemon.anthropic.requests import CountTokensRequest, MessagesRequest
from ctxreuse.daemon.anthropic.translate import Mark, chat_parts, tool_choice_of
from ctxreuse.daemon.formats import JsonSchema, ResponseFormat
from ctxreuse.daemon.middleware import CALLER, new_id
from ctxreuse.daemon.openai import ApiError, CallDelta, Delta
from ctxreuse_edge.api.answers import HttpAnswer, body_of, id_of, json_answer, running_answer
from ctxreuse_edge.api.chat import Chat, EdgeChatRequest

if TYPE_CHECKING:
    from ctxreuse.engines.generate import GeneratedToken
    from ctxreuse.runtime import Completion
    from ctxreuse_edge.api.calls import CallReader
    from ctxreuse_edge.node import EdgeNode

__all__ = ["PATH", "AnswerBlocks", "routes"]

#: What all paths of this API begin with.
PATH = "/v1/messages"


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    async def answer(request: Request) -> Response:
        body = await body_of(request, node, MessagesRequest)
        found = chat_parts(body)
        sampling: dict[str, Any] = {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "priority": body.priority,
            "ctxreuse": body.ctxreuse,
        }
        chat_body = msgspec.structs.replace(_chat_request(body, found.messages, found.tools), **sampling)
        return _MessageAnswer(node, body, chat_body, Chat(node, chat_body, id_of(request)), found.marks, id_of(request))

    async def count(request: Request) -> Response:
        body = await body_of(request, node, CountTokensRequest)
        found = chat_parts(body)
        chat = Chat(node, _chat_request(body, found.messages, found.tools), id_of(request))

        def work() -> TokensCount:
            with node.models.using(chat.model):
                return TokensCount(len(chat.encode().ids))

        return json_answer(await node.pool.call(work))

    return [Route(PATH, answer, methods=["POST"]), Route(f"{PATH}/count_tokens", count, methods=["POST"])]


def _chat_request(body: CountTokensRequest, messages: list[Any], tools: list[Any]) -> EdgeChatRequest:
    wanted, choice = body.output_config and body.output_config.format, body.tool_choice
    return EdgeChatRequest(
        model=body.model,
        messages=messages,
        tools=tools or None,
        tool_choice=tool_choice_of(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=ResponseFormat("json_schema", JsonSchema(schema=wanted.schema)) if wanted else None,
    )


class AnswerBlocks:
    """The blocks of one answer, as they come: the events of a stream, and the content of the whole."""

    def __init__(self) -> None:
        self._blocks: list[TextBlock | ToolUseBlock] = []
        self._said: list[list[str]] = []

    def add(self, delta: Delta) -> list[MessageEvent]:
        """Return the events of a piece of text or of a call."""
        events: list[MessageEvent] = []
        if delta.content:
            if not self._blocks or not isinstance(self._blocks[-1], TextBlock):
                events += self._begin(TextBlock(""))
            events.append(self._piece({"type": "text_delta", "text": delta.content}, delta.content))
        for call in delta.tool_calls or ():
            events += self._call(call)
        return events

    def _call(self, call: CallDelta) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        if isinstance(call.id, str) and isinstance(call.function.name, str):
            events = self._begin(ToolUseBlock(call.id.replace("call_", "toolu_", 1), call.function.name, {}))
        arguments = call.function.arguments
        if arguments:
            events.append(self._piece({"type": "input_json_delta", "partial_json": arguments}, arguments))
        return events

    def _begin(self, block: TextBlock | ToolUseBlock) -> list[MessageEvent]:
        events = self.end()
        self._blocks.append(block)
        self._said.append([])
        return [*events, MessageEvent("content_block_start", index=len(self._blocks) - 1, content_block=block)]

    def _piece(self, delta: dict[str, str], text: str) -> MessageEvent:
        self._said[-1].append(text)
        return MessageEvent("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def end(self) -> list[MessageEvent]:
        """Return the event that ends the last block, if there is one."""
        return [MessageEvent("content_block_stop", index=len(self._blocks) - 1)] if self._blocks else []

    @property
    def content(self) -> list[TextBlock | ToolUseBlock]:
        """All blocks; the input of a call that was cut is empty."""
        return [_whole(block, "".join(said)) for block, said in zip(self._blocks, self._said)]


def _whole(block: TextBlock | ToolUseBlock, said: str) -> TextBlock | ToolUseBlock:
    if isinstance(block, TextBlock):
        return TextBlock(said)
    try:
        return msgspec.structs.replace(block, input=msgspec.json.decode(said, type=dict[str, Any]))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return block


class _MessageAnswer(HttpAnswer):
    """``marks``: the prefixes to pin; ``request``: its id."""

    end = b""

    def __init__(
        self,
        node: EdgeNode,
        body: MessagesRequest,
        chat_body: EdgeChatRequest,
        chat: Chat,
        marks: Sequence[Mark],
        request: str,
    ) -> None:
        # All that `_begin` needs, as a thread calls it at once.
        self._name, self._requested, self._chat = new_id("msg"), body, chat
        self._marks, self._request = marks, request
        #: Tokens of the prefixes to pin, whole blocks, and the seconds of each.
        self._prefixes: list[tuple[int, float]] = []
        self._blocks, self._stop = AnswerBlocks(), ""
        self._reader: CallReader | None = None
        running = running_answer(node, chat.model, chat_body, self._name, self._begin, None)
        super().__init__(node, running, stream=bool(body.stream))

    def _begin(self, name: str, step: Callable[[], None]) -> Sequence[Completion]:
        chat = self._chat
        completions = chat.begin(name, step)
        # Of the same time only the last: its prefix has the others in it.
        for message, parts, seconds in {mark.seconds: mark for mark in self._marks}.values():
            end = chat.end_of_tools(parts) if message is None else chat.end_of(message, parts)
            block = chat.model.runtime.space.block_tokens
            self._prefixes.append((end // block * block, seconds))
        return completions

    def first(self) -> Sequence[Any]:
        return [MessageEvent("message_start", message=MessageAnswer(self._name, self._chat.model.name.id, self._usage))]

    def piece(self, number: int, piece: GeneratedToken) -> Sequence[Any]:
        self._stop = piece.stop
        if not self._chat.has_tools:
            return self._blocks.add(Delta(content=piece.text)) if piece.text else []
        if self._reader is None:
            self._reader = self._chat.reader()
        return [event for delta in self._reader.feed(piece.text) for event in self._blocks.add(delta)]

    def last(self) -> Sequence[Any]:
        left = self._reader.finish() if self._reader is not None else []
        events = [event for delta in left for event in self._blocks.add(delta)]
        self._keep()
        delta = EndDelta(self._stop_reason, self._stop or None)
        end = [MessageEvent("message_delta", delta=delta, usage=self._usage), MessageEvent("message_stop")]
        return [*events, *self._blocks.end(), *end]

    def whole(self) -> Any:
        self.last()
        return MessageAnswer(
            self._name,
            self._chat.model.name.id,
            self._usage,
            self._blocks.content,
            self._stop_reason,
            self._stop or None,
        )

    def encode(self, value: Any) -> bytes:
        return named_event(value)

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error, self._request) + b"\n\n"

    @property
    def _stop_reason(self) -> StopReason:
        completion = self.completions[0]
        if completion.finish == "stop_string":
            return "stop_sequence"
        if completion.finish == "length":
            cut = len(completion.tokens) < self._requested.max_tokens
            return "model_context_window_exceeded" if cut else "max_tokens"
        called = self._reader is not None and self._reader.finish_reason("stop") == "tool_calls"
        return "tool_use" if called else "end_turn"

    @property
    def _usage(self) -> AnthropicUsage:
        tokens = self.completions[0].usage.tokens
        ends = [max((end for end, time in self._prefixes if time >= least), default=0) for least in (0.0, 3600.0)]
        written, for_hour = (max(end - tokens.cached, 0) for end in ends)
        return AnthropicUsage(
            tokens.prompt - tokens.cached - written,
            tokens.completion,
            written,
            tokens.cached,
            CacheCreation(written - for_hour, for_hour),
        )

    def _keep(self) -> None:
        prompt, block = self._chat.prompt, self._chat.model.runtime.space.block_tokens
        for end, seconds in self._prefixes:
            if prompt is not None:
                self._node.pins.keep(prompt.keys[: end // block], seconds, CALLER.get())
