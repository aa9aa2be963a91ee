"""OpenAI's ``/v1/responses``; a stored response is a session of the ledger, and one that continues it a fork.

::

    POST   /v1/responses                  {"input", "previous_response_id"?, "store"?, "stream"?, …}
    POST   /v1/responses/input_tokens     the length of its prompt
    GET    /v1/responses/ID               DELETE, too
    GET    /v1/responses/ID/input_items   ?limit=20&order=desc&after=ITEM
    POST   /v1/responses/ID/cancel        refused: none is made in the background
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
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
    named_event,
    response_usage,
)
from ctxreuse.errors import SessionError
from ctxreuse.identity.keys import as_tokens
from ctxreuse_edge.api.answers import (
    HttpAnswer,
    body_of,
    finish_of,
    id_of,
    json_answer,
    running_answer,
)
from ctxreuse_edge.api.response_prompt import EdgeResponsesRequest, ResponsePrompt
from ctxreuse_edge.responses import new_response_id

if TYPE_CHECKING:
    from ctxreuse.engines.generate import GeneratedToken
    from ctxreuse_edge.api.calls import CallReader
    from ctxreuse_edge.node import EdgeNode

__all__ = ["routes"]


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    async def create(request: Request) -> Response:
        body = await body_of(request, node, EdgeResponsesRequest)
        return _ResponseAnswer(node, body, id_of(request))

    async def count(request: Request) -> Response:
        prompt = ResponsePrompt(node, await body_of(request, node, EdgeResponsesRequest), id_of(request))

        def work() -> int:
            with node.models.using(prompt.chat.model):
                return prompt.count()

        return json_answer({"object": "response.input_tokens", "input_tokens": await node.pool.call(work)})

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
        Route("/v1/responses/input_tokens", count, methods=["POST"]),
        Route("/v1/responses/{name}", one, methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/input_items", items, methods=["GET"]),
        Route("/v1/responses/{name}/cancel", cancel, methods=["POST"]),
    ]


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

    def __init__(self, node: EdgeNode, body: EdgeResponsesRequest, request: str) -> None:
        self._requested, self._prompt = body, ResponsePrompt(node, body, request)
        id, model, begin = new_response_id(), self._prompt.chat.model, self._prompt.begin
        running = running_answer(node, model, self._prompt.chat_request, id, begin, body.keep_alive)
        super().__init__(node, running, stream=bool(body.stream))
        self._response = ResponseObject.begun(body, id, model.name.id, int(time.time()))
        self._writer, self._closing = OutputWriter(), list[Any]()
        self._reader: CallReader | None = None
        self._reporter: LogprobReporter | None = None

    def first(self) -> Sequence[Any]:
        return [self._writer.lifecycle(kind, self._response) for kind in ("created", "in_progress")]

    def piece(self, number: int, piece: GeneratedToken) -> Sequence[Any]:
        logprobs = self._logprobs(piece) if self._requested.wants_logprobs else ()
        deltas = [Delta(content=piece.text)] if piece.text else []
        if self._prompt.chat.has_tools:
            if self._reader is None:
                self._reader = self._prompt.chat.reader()
            deltas = self._reader.feed(piece.text)
        if logprobs and not deltas:
            deltas = [Delta()]
        reports = [logprobs, *[()] * len(deltas)]
        return [event for delta, report in zip(deltas, reports) for event in self._writer.feed(delta, report)]

    def _logprobs(self, piece: GeneratedToken) -> Sequence[TokenLogprob]:
        if self._reporter is None:
            text = self._prompt.chat.model.runtime.text
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
        prompt, runtime = self._prompt, self._prompt.chat.model.runtime
        ids = as_tokens(np.concatenate([prompt.chat.encoded.ids, as_tokens(completion.tokens)]))
        if self._requested.kept_seconds:
            self._node.pins.keep(runtime.keys(ids), self._requested.kept_seconds, CALLER.get())
        if self._requested.stored:
            made = [Item.made(item) for item in self._writer.output]
            space = runtime.space.digest
            await asyncio.to_thread(
                self._node.responses.store, self._response, prompt.given, made, prompt.continued, ids, space
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
