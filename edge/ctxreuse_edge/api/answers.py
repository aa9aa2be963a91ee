"""What all answers of the API have in common: how sampling is asked for, how pieces are sent, what a hang-up does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ctxreuse.daemon.openai import DONE, ApiError, SamplingFields, api_error, event
from ctxreuse.engines.sampling import Sampling
from ctxreuse.errors import ConfigError, ContextTooLongError, CtxReuseError
from ctxreuse.levels import check_lossy, damage

if TYPE_CHECKING:
    from ctxreuse.engines.generate import Piece
    from ctxreuse.runtime import Completion
    from ctxreuse_edge.node import Node
    from ctxreuse_edge.worker import Running

__all__ = ["Answer", "body_of", "finish_of", "id_of", "json_answer", "known_model", "lossy_of", "sampling_of"]

_FINISH = {"stop": "stop", "stop_string": "stop", "length": "length"}


async def body_of(request: Request, node: Node) -> bytes:
    """The request's body, within the limit of the settings."""
    from ctxreuse.daemon.front import read_body

    return await read_body(request, node.settings.edge.max_body)


def id_of(request: Request) -> str:
    """The request's id: what it came with in ``x-request-id``, or was given; the answer bears it too."""
    return str(request.scope["state"]["request_id"])


def json_answer(value: Any, status: int = 200) -> Response:
    """A value as a JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def known_model(node: Node, name: str) -> None:
    """Raises ApiError (404) unless ``name`` is the model that is served, or empty."""
    if name not in ("", "default", node.model.id, node.settings.engine.model):
        raise ApiError(
            404,
            f"the model {name!r} is not served here; {node.model.id!r} is",
            type="not_found_error",
            code="model_not_found",
            param="model",
        )


def sampling_of(asked: SamplingFields, prompt: int, longest: int, max_tokens: int | None) -> Sampling:
    """How to sample, with the OpenAI API's defaults; the answer may be as long as there is room for.

    Raises ApiError for what cannot be done, ContextTooLongError if there is no room.
    """
    if asked.n not in (None, 1):
        raise ApiError(400, "n: only one answer a request is made here; send the request again", param="n")
    room = longest - prompt
    if room < 1:
        raise ContextTooLongError(f"the prompt has {prompt:,} tokens and the model takes {longest:,}, answer included")
    return Sampling(
        max_tokens=room if max_tokens is None else min(max_tokens, room),
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=max(asked.top_k or 0, 0),  # -1 is off elsewhere
        min_p=asked.min_p or 0.0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        seed=asked.seed,
        stop=asked.stops,
        ignore_eos=asked.ignore_eos,
    )


def lossy_of(node: Node, asked: str | None) -> str | None:
    """The worst level of KV that a request may reuse; None for exact only. What is allowed need not be there: without a
    card for the model nothing lossy is (yet), and of a card's levels it is the worst that is no worse than what was
    asked for. With a chunk card it is what was asked for: moved rows have no levels of their own. Raises ApiError for
    what names no level."""
    wanted = node.settings.edge.lossy if asked is None else asked
    if not wanted:
        return None
    try:
        limit = damage(check_lossy(wanted))
    except ConfigError as error:
        raise ApiError(400, str(error), param="lossy") from None
    node.links.want_cards()
    if node.runtime.anywhere.gate.card is not None:
        return wanted
    codec = node.runtime.engine.codec
    held = [info.name for info in codec.levels if info.lossy and damage(info.name) <= limit] if codec else []
    return max(held, key=damage, default=None)


def finish_of(completion: Completion) -> str:
    """Why an answer ended, in the API's words."""
    return _FINISH.get(completion.finish or "", "stop")


class Answer(Response):
    """One answer, sent whole or as events, made while it is sent; a client that hangs up ends the making of it.

    What fails before the first piece is raised, so that it becomes a status; later it becomes an event.
    """

    def __init__(self, node: Node, running: Running, *, stream: bool) -> None:
        super().__init__(media_type="text/event-stream" if stream else "application/json")
        self._node, self._running, self._stream = node, running, stream
        self._began = time.perf_counter()

    @abstractmethod
    def first(self, completion: Completion) -> Sequence[Any]:
        """Events before the first piece."""

    @abstractmethod
    def piece(self, completion: Completion, piece: Piece) -> Sequence[Any]:
        """Events of a piece."""

    @abstractmethod
    def last(self, completion: Completion) -> Sequence[Any]:
        """Events after the last piece."""

    @abstractmethod
    def whole(self, completion: Completion) -> Any:
        """The answer that is not streamed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `starlette.types.ASGIApp`."""
        watching = asyncio.create_task(self._watch(receive))
        try:
            await (self._events(send) if self._stream else self._body(scope, receive, send))
        finally:
            self._running.cancel()
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._running.cancel()

    async def _pieces(self) -> AsyncIterator[Piece]:
        first = True
        async for piece in self._running:
            if first:
                self._node.metrics.observe("ctxreuse_first_token_seconds", time.perf_counter() - self._began)
                first = False
            yield piece

    async def _body(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for _ in self._pieces():
            pass
        completion = self._running.completion
        if completion is not None and completion.finish not in (None, "cancelled", "error"):
            await json_answer(self.whole(completion))(scope, receive, send)

    async def _events(self, send: Send) -> None:
        begun = False

        async def give(events: Sequence[Any]) -> None:
            nonlocal begun
            if not begun:
                begun = True
                head = [*self.raw_headers, (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
                head = [(name, value) for name, value in head if name != b"content-length"]
                await send({"type": "http.response.start", "status": 200, "headers": head})
            if events:
                body = b"".join(map(event, events))
                await send({"type": "http.response.body", "body": body, "more_body": True})

        completion: Completion | None = None
        try:
            async for piece in self._pieces():
                if completion is None:
                    completion = self._running.completion
                    assert completion is not None
                    await give(self.first(completion))
                await give(self.piece(completion, piece))
            completion = self._running.completion
            if completion is None or completion.finish in (None, "cancelled", "error"):
                return  # nobody reads any more
            if not begun:  # max_tokens was 0
                await give(self.first(completion))
            await give(self.last(completion))
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        except CtxReuseError as error:
            if not begun:
                raise
            await send({"type": "http.response.body", "body": b"data: " + api_error(error).body() + b"\n\n"})
