"""OpenAI's ``/v1/responses``; a stored response is a session of the ledger, and one that continues it a fork.

::

    POST   /v1/responses                  {"input", "previous_response_id"?, "store"?, "stream"?, …}
    GET    /v1/responses/ID               DELETE, too
    GET    /v1/responses/ID/input_items   ?limit=20&order=desc&after=ITEM
    POST   /v1/responses/ID/cancel        refused: none is made in the background
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.logprobs import LogprobReporter, TokenLogprob
from ctxreuse.daemon.middleware import CALLER
from ctxreuse.daemon.openai import ApiError, Delta
from ctxreuse.daemon.responses import (
    Item,
    OutputWriter,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    chat_fields,
    check_outputs,
    input_items,
    latest,
    messages_of,
    named_event,
    response_usage,
)
from ctxreuse.engines.text import Message
from ctxreuse.errors import ContextTooLongError, SessionError
from ctxreuse.identity.keys import as_tokens
from ctxreuse_edge.api.answers import (
    HttpAnswer,
    KeepAlive,
    body_of,
    finish_of,
    id_of,
    json_answer,
    running_answer,
)
from ctxreuse_edge.api.chat import Chat, EdgeChatRequest
from ctxreuse_edge.responses import Continued, new_response_id

if TYPE_CHECKING:
    from ctxreuse.engines.generate import GeneratedToken
    from ctxreuse.runtime import Completion
    from ctxreuse_edge.api.calls import CallReader
    from ctxreuse_edge.node import EdgeNode

__all__ = ["EdgeResponsesRequest", "routes"]

#: Fields of a chat request as this API calls them.
_WORDS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
}


#: How many items are dropped at a time.
_DOZEN = 12


class EdgeResponsesRequest(ResponsesRequest, frozen=True, kw_only=True):
    """A request for a response; ``keep_alive``: see `EdgeChatRequest`."""

    keep_alive: KeepAlive = None


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    async def create(request: Request) -> Response:
        body = await body_of(request, node, EdgeResponsesRequest)
        with _our_words():
            return _ResponseAnswer(node, body, id_of(request))

    async def one(request: Request) -> Response:
        id = request.path_params["name"]
        with _not_found():
            if request.method == "DELETE":
                await node.pool.call(lambda: node.models.use_first(lambda: node.responses.delete(id)))
                return json_answer({"id": id, "object": "response", "deleted": True})
            if request.query_params.get("stream") == "true":
                raise ApiError(400, "stream: a stored response is given whole", param="stream")
            return json_answer(await node.pool.call(lambda: node.responses.get(id)))

    async def items(request: Request) -> Response:
        limit, order, after = _page(request)
        with _not_found():
            found = await node.pool.call(lambda: node.responses.input_items(request.path_params["name"]))
        if order == "desc":
            found.reverse()
        start = next((n + 1 for n, item in enumerate(found) if item["id"] == after), 0 if not after else len(found))
        page = found[start : start + limit]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return json_answer({"object": "list", "data": page, **ends, "has_more": start + limit < len(found)})

    async def cancel(request: Request) -> Response:
        what = "only a response made in the background can be cancelled, and none is; close its stream instead"
        raise ApiError(400, what, param="id", code="not_in_background")

    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/{name}", one, methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/input_items", items, methods=["GET"]),
        Route("/v1/responses/{name}/cancel", cancel, methods=["POST"]),
    ]


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


@contextlib.contextmanager
def _not_found() -> Iterator[None]:
    try:
        yield
    except SessionError as error:
        raise ApiError(404, str(error), type="not_found_error", code="response_not_found", param="id") from None


def _page(request: Request) -> tuple[int, str, str]:
    """The limit, order and last item known of a listing. Raises ApiError."""
    query = request.query_params
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:10]) <= 100:
        raise ApiError(400, "limit must be a number from 1 to 100", param="limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be asc or desc", param="order")
    return int(limit), order, query.get("after", "")


class _ResponseAnswer(HttpAnswer):
    """A response in the making, which is kept before its last event is sent."""

    end = b""

    def __init__(self, node: EdgeNode, wanted: EdgeResponsesRequest, request: str) -> None:
        # What the pool's thread uses, which may begin at once.
        self._node, self._requested, self._given = node, wanted, input_items(wanted.input)
        self._continued: Continued | None = None
        self._dropped = 0
        if not self._given and not wanted.previous_response_id:
            raise ApiError(400, "input: there is nothing to answer", param="input")
        body = EdgeChatRequest(messages=[], keep_alive=wanted.keep_alive, **chat_fields(wanted))
        self._chat = Chat(node, body, request, self._messages, session=wanted.prompt_cache_key or "")
        id, model = new_response_id(), self._chat.model
        super().__init__(
            node,
            running_answer(node, model, body, id, self._begin, wanted.keep_alive),
            stream=bool(wanted.stream),
        )
        self._response = ResponseObject.begun(wanted, id, model.name.id, int(time.time()))
        self._writer, self._closing = OutputWriter(), list[Any]()
        self._reader: CallReader | None = None
        self._reporter: LogprobReporter | None = None

    def _messages(self) -> Sequence[Message]:
        """All messages of the prompt."""
        wanted, before = self._requested, list[Item]()
        if wanted.previous_response_id:
            try:
                self._continued = self._node.responses.continued(wanted.previous_response_id)
            except SessionError as error:
                where = "previous_response_id"
                raise ApiError(400, f"{where}: {error}", code="previous_response_not_found", param=where) from None
            before = self._continued.items
        check_outputs(before, self._given)
        first = [Message("system", wanted.instructions)] if wanted.instructions else []
        return [*first, *messages_of(latest([*before, *self._given], self._dropped))]

    def _begin(self, name: str, step: Callable[[], None]) -> list[Completion]:
        with _our_words():
            if self._requested.truncation == "auto":
                self._make_room(step)
            return self._chat.begin(name, step)

    def _make_room(self, step: Callable[[], None]) -> None:
        """Drop as few of the oldest items as make the prompt fit, with room for an answer.

        They go by the dozen while there are more: the beginning of the next prompts stays the same then, and its KV.
        """
        longest = self._chat.model.runtime.space.max_tokens
        room = longest - min(self._requested.max_output_tokens or longest // 8, longest // 2)

        def fits(dropped: int) -> bool:
            step()
            self._dropped = dropped
            try:
                return len(self._chat.encode().ids) <= room
            except ContextTooLongError:
                return False

        if not fits(0):
            count = len(self._given) + (len(self._continued.items) if self._continued is not None else 0)
            last = max(count - 1, 0)
            steps = sorted({*range(_DOZEN, last, _DOZEN), *range(max(last - _DOZEN, 0), last + 1)})
            found = bisect.bisect_left(steps, True, key=fits)
            self._dropped = steps[min(found, len(steps) - 1)]

    def first(self) -> Sequence[Any]:
        return [self._writer.lifecycle(kind, self._response) for kind in ("created", "in_progress")]

    def piece(self, number: int, piece: GeneratedToken) -> Sequence[Any]:
        logprobs = self._logprobs(piece) if self._requested.wants_logprobs else ()
        deltas = [Delta(content=piece.text)] if piece.text else []
        if self._chat.has_tools:
            if self._reader is None:
                self._reader = self._chat.reader()
            deltas = self._reader.feed(piece.text)
        if logprobs and not deltas:
            deltas = [Delta()]
        reports = [logprobs, *[()] * len(deltas)]
        return [event for delta, report in zip(deltas, reports) for event in self._writer.feed(delta, report)]

    def _logprobs(self, piece: GeneratedToken) -> Sequence[TokenLogprob]:
        if self._reporter is None:
            text = self._chat.model.runtime.text
            assert text is not None
            self._reporter = LogprobReporter(text, self._requested.top_logprobs or 0)
        report = self._reporter.chat([piece])
        return report.content if report is not None else ()

    async def settle(self) -> None:
        (completion,) = self.completions
        cut = finish_of(completion) == "length"
        for delta in self._reader.finish() if self._reader is not None else ():
            self._closing += self._writer.feed(delta)
        self._closing += self._writer.finish(cut=cut)
        self._response = msgspec.structs.replace(
            self._response,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            output=self._writer.output,
            usage=response_usage(completion.usage),
        )
        ids = as_tokens(np.concatenate([self._chat.encoded.ids, as_tokens(completion.tokens)]))
        runtime = self._chat.model.runtime
        if self._requested.kept_seconds:
            self._node.pins.keep(runtime.keys(ids), self._requested.kept_seconds, CALLER.get())
        if self._requested.stored:
            made = [Item.made(item) for item in self._writer.output]
            space = runtime.space.digest
            await asyncio.to_thread(
                self._node.responses.store, self._response, self._given, made, self._continued, ids, space
            )

    def last(self) -> Sequence[Any]:
        return [*self._closing, self._writer.lifecycle(self._response.status, self._response)]

    def whole(self) -> Any:
        return self._response

    def encode(self, value: Any) -> bytes:
        return named_event(value)

    def failure(self, error: ApiError) -> bytes:
        failed = ResponseFailure(error.code or error.type, error.message)
        response = msgspec.structs.replace(self._response, status="failed", error=failed, output=self._writer.output)
        return named_event(self._writer.lifecycle("failed", response))
