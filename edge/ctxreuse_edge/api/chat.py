"""``POST /v1/chat/completions``: messages in, the next message out.

A content of several text parts (documents, then a question) is encoded part by part, so that each is known again
wherever it stands: with ``"ctxreuse": {"lossy": …}``, or ``edge.lossy`` in the settings, its KV is moved there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.front import new_id
from ctxreuse.daemon.openai import (
    ApiError,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChunkChoice,
    Delta,
    Reply,
    Usage,
    parse,
    usage_of,
)
from ctxreuse.engines.prompt import Prompted, prompt
from ctxreuse.engines.text import Message
from ctxreuse.pauses import Kind
from ctxreuse.pauses.kinds import TOOL_CALL
from ctxreuse.why import About, Part
from ctxreuse_edge.api.answers import Answer, body_of, finish_of, id_of, known_model, lossy_of, sampling_of

if TYPE_CHECKING:
    import msgspec

    from ctxreuse.engines.generate import Piece
    from ctxreuse.runtime import Completion
    from ctxreuse_edge.node import Node
    from ctxreuse_edge.worker import Running

#: Roles of messages that bring a tool's result: the session waited for it, whatever its answer had said.
_TOOL_ROLES = frozenset(("tool", "function"))

__all__ = ["EdgeChatRequest", "about_messages", "branches_of", "routes"]


class EdgeChatRequest(ChatRequest, frozen=True, kw_only=True):
    """A chat request that may go on from a named ``context``: its messages come before the request's own."""

    context: str | None = None


def branches_of(ends: Sequence[int]) -> tuple[int, ...]:
    """The ends of turns at which other contexts are likely to part: the first (a shared system prompt) and the last
    two (this conversation going on, this question asked again)."""
    return tuple(sorted({*ends[:1], *ends[-2:]}))


def about_messages(messages: Sequence[Message], found: Prompted, request: str = "", alias: str = "") -> About:
    """The parts of a conversation's prompt: its messages, as far as one can tell where each ends."""
    # The template may refuse to end after some; those stand together with the next, and are named with it.
    names = [message.role for message in messages]
    if len(found.ends) == len(names):
        parts = tuple(Part(name, end) for name, end in zip(names, found.ends))
    else:
        parts = tuple(Part("", end) for end in found.ends)
    return About(request, alias, parts=parts, opening=messages[0].content if messages else "")


def routes(node: Node) -> list[Route]:
    """The routes of this module."""

    async def answer(request: Request) -> Response:
        asked = parse(await body_of(request, node), EdgeChatRequest)
        known_model(node, asked.model)
        _refuse_unsupported(asked)

        name = new_id("chatcmpl")

        def make() -> Completion:
            before = node.contexts.messages(asked.context) if asked.context else []
            messages = [m.message(f"messages[{i}].content") for i, m in enumerate(asked.messages)]
            text, space = node.runtime.text, node.runtime.engine.space
            if text is None:
                raise ApiError(400, "the model has no tokenizer: send token ids to /v1/completions")
            found = prompt(text, [*before, *messages])
            limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
            sampling = sampling_of(asked, len(found.ids), space.max_tokens, limit)
            lossy = lossy_of(node, asked.ctxreuse.lossy)
            about = about_messages([*before, *messages], found, id_of(request), name)
            branches = branches_of(found.ends)
            was = Kind(TOOL_CALL) if messages and messages[-1].role in _TOOL_ROLES else None
            return node.runtime.complete(
                found.ids, sampling, branches=branches, parts=found.parts, lossy=lossy, about=about, was=was
            )

        return _Chat(node, asked, node.worker.begin(make), name)

    return [Route("/v1/chat/completions", answer, methods=["POST"])]


def _refuse_unsupported(asked: ChatRequest) -> None:
    if asked.logprobs or asked.top_logprobs:
        raise ApiError(400, "logprobs are not given here", param="logprobs")
    if asked.tools:
        raise ApiError(400, "tools are not supported: describe them in a message", param="tools")
    if asked.response_format and asked.response_format.get("type", "text") != "text":
        raise ApiError(400, "only plain text is answered", param="response_format")


class _Chat(Answer):
    def __init__(self, node: Node, asked: ChatRequest, running: Running, name: str) -> None:
        super().__init__(node, running, stream=bool(asked.stream))
        self._id, self._created = name, int(time.time())
        self._usage_wanted = bool(asked.stream_options and asked.stream_options.include_usage)

    def _chunk(
        self, delta: Delta | None, finish: str | None = None, usage: Usage | msgspec.UnsetType | None = None
    ) -> ChatChunk:
        import msgspec

        if usage is None and not self._usage_wanted:
            usage = msgspec.UNSET
        choices = [] if delta is None else [ChunkChoice(delta, finish)]
        return ChatChunk(self._id, self._created, self._node.model.id, choices, self._node.fingerprint, usage)

    def first(self, completion: Completion) -> Sequence[Any]:
        return [self._chunk(Delta("assistant", ""))]

    def piece(self, completion: Completion, piece: Piece) -> Sequence[Any]:
        return [self._chunk(Delta(content=piece.text))] if piece.text else []

    def last(self, completion: Completion) -> Sequence[Any]:
        usage, finish = usage_of(completion.usage), finish_of(completion)
        if self._usage_wanted:
            return [self._chunk(Delta(), finish), self._chunk(None, usage=usage)]
        return [self._chunk(Delta(), finish, usage)]

    def whole(self, completion: Completion) -> Any:
        choice = ChatChoice(Reply(completion.text), finish_of(completion))
        node, usage = self._node, usage_of(completion.usage)
        return ChatCompletion(self._id, self._created, node.model.id, [choice], usage, node.fingerprint)
