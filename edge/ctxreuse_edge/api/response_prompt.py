"""A request for a response as a prompt: what it continues, its own input, less what is dropped if that is too long."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ctxreuse.daemon.openai import ApiError
from ctxreuse.daemon.responses import (
    Item,
    ResponsesRequest,
    chat_fields,
    check_outputs,
    input_items,
    latest,
    messages_of,
)
from ctxreuse.engines.text import Message
from ctxreuse.errors import ContextTooLongError, SessionError
from ctxreuse_edge.api.answers import KeepAlive
from ctxreuse_edge.api.chat import Chat, EdgeChatRequest
from ctxreuse_edge.responses import Continued

if TYPE_CHECKING:
    from ctxreuse.runtime import Completion
    from ctxreuse_edge.node import EdgeNode

__all__ = ["EdgeResponsesRequest", "ResponsePrompt"]

#: Fields of a chat request as this API calls them.
_WORDS = {"response_format.json_schema": "text.format", "response_format": "text.format", "messages": "input"}
#: How many items are dropped at a time.
_DOZEN = 12


class EdgeResponsesRequest(ResponsesRequest, frozen=True, kw_only=True):
    """A request for a response; ``keep_alive``: see `EdgeChatRequest`."""

    keep_alive: KeepAlive = None


@contextlib.contextmanager
def _our_words() -> Iterator[None]:
    """Let errors of the shared chat name the fields of this API."""
    try:
        yield
    except ContextTooLongError as error:
        raise ApiError(400, str(error), code="context_length_exceeded", param="input") from None
    except ApiError as error:
        for theirs, ours in _WORDS.items():
            if error.param is not None and error.param.startswith(theirs):
                error.message = error.message.replace(error.param, ours + error.param[len(theirs) :], 1)
                error.param = ours + error.param[len(theirs) :]
                break
        raise


class ResponsePrompt:
    """The prompt of one request. Raises ApiError for what is no request.

    Attributes:
        chat_request: the request as the shared chat has it.
        chat: the prompt and the answer behind it.
        given: the items of the input.
        continued: the response that it continues, after `begin` or `count`.
    """

    def __init__(self, node: EdgeNode, body: EdgeResponsesRequest, request: str) -> None:
        """``request``: its id, under which `why` explains it."""
        self._node, self._body, self._dropped = node, body, 0
        self.given = input_items(body.input)
        self.continued: Continued | None = None
        if not self.given and not body.previous_response_id:
            raise ApiError(400, "input: there is nothing to answer", param="input")
        with _our_words():
            self.chat_request = EdgeChatRequest(messages=[], keep_alive=body.keep_alive, **chat_fields(body))
            session = body.prompt_cache_key or ""
            self.chat = Chat(node, self.chat_request, request, self._messages, session=session)

    def begin(self, name: str, step: Callable[[], None]) -> list[Completion]:
        """See `Chat.begin`."""
        with _our_words():
            if self._body.truncation == "auto":
                self._make_room(step)
            return self.chat.begin(name, step)

    def count(self) -> int:
        """Return the number of the prompt's tokens. The model must be loaded."""
        with _our_words():
            if self._body.truncation == "auto":
                self._make_room(lambda: None)
            return len(self.chat.encode().ids)

    def _messages(self) -> Sequence[Message]:
        """All messages of the prompt."""
        body, before = self._body, list[Item]()
        if body.previous_response_id:
            try:
                self.continued = self._node.responses.continued(body.previous_response_id)
            except SessionError as error:
                where = "previous_response_id"
                raise ApiError(400, f"{where}: {error}", code="previous_response_not_found", param=where) from None
            before = self.continued.items
        check_outputs(before, self.given)
        first = [Message("system", body.instructions)] if body.instructions else []
        return [*first, *messages_of(latest([*before, *self.given], self._dropped))]

    def _make_room(self, step: Callable[[], None]) -> None:
        """Drop as few of the oldest items as make the prompt fit, with room for an answer.

        They go by the dozen while there are more: the beginning of the next prompts stays the same then, and its KV.
        """
        longest = self.chat.model.runtime.space.max_tokens
        room = longest - min(self._body.max_output_tokens or longest // 8, longest // 2)

        def fits(dropped: int) -> bool:
            step()
            self._dropped = dropped
            try:
                return len(self.chat.encode().ids) <= room
            except ContextTooLongError:
                return False

        if not fits(0):
            count = len(self.given) + (len(self.continued.items) if self.continued is not None else 0)
            last = max(count - 1, 0)
            steps = sorted({*range(_DOZEN, last, _DOZEN), *range(max(last - _DOZEN, 0), last + 1)})
            found = bisect.bisect_left(steps, True, key=fits)
            self._dropped = steps[min(found, len(steps) - 1)]
