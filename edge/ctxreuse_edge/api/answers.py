"""What the routes of the API share: reading requests, sampling parameters, sending answers whole or streamed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ctxreuse.block.levels import allowed_by, check_limit, check_lossy, expected_kl, limit_of
from ctxreuse.daemon.logprobs import LogprobReporter, mean_logprob
from ctxreuse.daemon.middleware import new_id, read_body, spend
from ctxreuse.daemon.openai import (
    DONE,
    ApiError,
    ApiUsage,
    SamplingFields,
    api_error,
    event,
    ignored_fields,
    parse,
    usage_of,
)
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.errors import ConfigError, ContextTooLongError, CtxReuseError
from ctxreuse.identity.keys import as_tokens
from ctxreuse.pauses.envelope import hint_outcomes, read_hints, summary
from ctxreuse.usage import total_usage
from ctxreuse_edge.kv_hints import take_hints
from ctxreuse_edge.models import check_keep_alive

if TYPE_CHECKING:
    from ctxreuse.engines.generate import GeneratedToken
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.runtime import Completion, Runtime
    from ctxreuse.runtime.request import Request as Prompt
    from ctxreuse_edge.models import ServedModel
    from ctxreuse_edge.node import EdgeNode
    from ctxreuse_edge.worker import Piece, RunningAnswer

__all__ = [
    "HttpAnswer",
    "KeepAlive",
    "Make",
    "OpenAiAnswer",
    "Usages",
    "body_of",
    "finish_of",
    "id_of",
    "json_answer",
    "max_kl_of",
    "post_route",
    "running_answer",
    "sampling_of",
]

T = TypeVar("T")

#: The usage in an event.
Usages: TypeAlias = ApiUsage | msgspec.UnsetType | None

#: How long a model stays loaded after a request, in Ollama's words; None: as the settings say.
KeepAlive: TypeAlias = str | int | float | None
#: Begins the answers with this id; calls the function before each long step.
Make: TypeAlias = "Callable[[str, Callable[[], None]], Sequence[Completion]]"

_FINISH = {"stop": "stop", "stop_string": "stop", "length": "length"}


async def body_of(request: Request, node: EdgeNode, kind: type[T]) -> T:
    """Return the request's body, read and checked within the limit of the settings; notes its ignored fields, and what
    becomes of its KV hints, which headers of the answer will name. Raises ApiError."""
    raw = await read_body(request, node.settings.edge.max_body)
    body = parse(raw, kind)
    request.scope["state"]["ignored"] = ", ".join(ignored_fields(raw, kind))
    if (hints := getattr(body, "kv_hints", None)) is not None:
        request.scope["state"]["kv_hints"] = summary(hint_outcomes(read_hints(hints)))
    return body


def id_of(request: Request) -> str:
    """Return the request's id: its header ``x-request-id``, else a new one; the answer has it, too."""
    return str(request.scope["state"]["request_id"])


def json_answer(value: Any, status: int = 200) -> Response:
    """Return a value as a JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def post_route(
    node: EdgeNode,
    path: str,
    kind: type[T],
    work: Callable[[Request, T], Any],
    priority: Callable[[T], int] = lambda _: 0,
) -> Route:
    """Return a POST route that parses the body, runs ``work`` in the pool while the first model is loaded, and answers
    its result as JSON."""

    async def answer(request: Request) -> Response:
        body = await body_of(request, node, kind)
        found = await node.pool.call(lambda: node.models.use_first(lambda: work(request, body)), priority(body))
        return json_answer(found)

    return Route(path, answer, methods=["POST"])


def sampling_of(body: SamplingFields, prompt: int, space: ModelSpace, max_tokens: int | None) -> SamplingParams:
    """Return the sampling parameters, with the OpenAI API's defaults; the answer may fill the model's context.

    Raises ApiError for what is not supported, ContextTooLongError if there is no room.
    """
    longest, bias = space.max_tokens, body.logit_bias or {}
    wrong = next((token for token in bias if not 0 <= token < space.vocab_size), None)
    if wrong is not None:
        what = f"logit_bias: {wrong} is no token of the model, which has {space.vocab_size:,}"
        raise ApiError(400, what, param="logit_bias", code="token_out_of_range")
    room = longest - prompt
    if room < 1:
        raise ContextTooLongError(f"the prompt has {prompt:,} tokens and the model takes {longest:,}, answer included")
    return SamplingParams(
        max_tokens=room if max_tokens is None else min(max_tokens, room),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),  # other servers write -1 for off
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=body.seed,
        stop=body.stops,
        ignore_eos=body.ignore_eos,
        logit_bias=bias,
        logprobs=body.reported_logprobs,
        speculate=body.ctxreuse.speculate,
        verify=body.ctxreuse.verify,
        step_threshold=body.ctxreuse.step_threshold,
        exits=0.0 if body.ctxreuse.exits == "off" else body.ctxreuse.exits,
    )


def max_kl_of(node: EdgeNode, level: str | None, runtime: Runtime | None = None) -> float | None:
    """Return the quality limit of a request, in nats a token; None: exact KV only.

    ``level``: the request's level or number, "": exact; None: ``edge.max_kl`` of the settings. Without a chunk profile,
    which measures errors itself, the result is the largest expected error within the limit among the levels of the
    calibration profile; None without a profile. ``runtime``: None: that of the first model. Raises ApiError for an
    unknown level.
    """
    try:
        limit = _limit(node.settings.edge.max_kl if level is None else level)
    except ConfigError as error:
        raise ApiError(400, str(error), param="lossy") from None
    if limit is None:
        return None
    node.links.fetch_profiles()
    runtime = runtime or node.runtime
    if runtime.chunk_reuse.gate.profile is not None:
        return limit
    codec = runtime.engine.codec
    levels = codec.levels if codec is not None else ()
    within = [expected_kl(info.name) for info in levels if info.lossy and allowed_by(info.name, limit)]
    return max(within, default=None)


def _limit(text: str) -> float | None:
    """Read a limit as a number or the name of a level."""
    try:
        return check_limit(float(text)) if text else None
    except ValueError:
        return limit_of(check_lossy(text))


def finish_of(completion: Completion) -> str:
    """Return the API's finish reason of an answer."""
    return _FINISH.get(completion.finish or "", "stop")


def running_answer(
    node: EdgeNode, model: ServedModel, body: SamplingFields, name: str, make: Make, keep_alive: KeepAlive
) -> RunningAnswer:
    """Begin the answers with the id ``name`` in the pool, while the model is loaded: see `RequestPool.begin` and
    `ServedModels.using`. Raises ApiError for a wrong ``keep_alive``."""
    seconds = None if keep_alive is None else check_keep_alive(keep_alive)
    using = node.models.using(model, seconds)
    return node.pool.begin(lambda step: make(name, step), body.priority, using, answers=body.answers)


class HttpAnswer(Response):
    """Answers sent while they are made, whole or as events; a client that disconnects cancels them.

    An error before the first piece is raised, and becomes a status; later it becomes an event.
    """

    #: What ends a stream of events, and the type of streams.
    end, stream_type = DONE, "text/event-stream"

    def __init__(self, node: EdgeNode, running: RunningAnswer, *, stream: bool) -> None:
        super().__init__(media_type=self.stream_type if stream else "application/json")
        self._node, self._running, self._stream = node, running, stream
        self._began = time.perf_counter()

    @property
    def completions(self) -> Sequence[Completion]:
        """The answers."""
        return self._running.completions

    @abstractmethod
    def first(self) -> Sequence[Any]:
        """Return the events before the first piece."""

    @abstractmethod
    def piece(self, number: int, piece: GeneratedToken) -> Sequence[Any]:
        """Return the events of a piece of the answer ``number``."""

    @abstractmethod
    def last(self) -> Sequence[Any]:
        """Return the events after the last piece."""

    @abstractmethod
    def whole(self) -> Any:
        """Return what is not streamed."""

    async def settle(self) -> None:
        """Do what has to be done after the last piece, before the last event is sent."""

    def encode(self, value: Any) -> bytes:
        """Return an event as it is sent."""
        return event(value)

    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error after the first piece."""
        return b"data: " + error.body() + b"\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `starlette.types.ASGIApp`."""
        watching = asyncio.create_task(self._watch(receive))
        try:
            await (self._events(send) if self._stream else self._body(scope, receive, send))
        finally:
            self._running.cancel()
            usages = [completion.usage for completion in self.completions]
            if usages:
                usage = total_usage(usages)
                spend(scope, usage.tokens.computed + usage.completion_tokens)
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
        async for number, piece in self._pieces():
            self.piece(number, piece)
        if self._complete:
            await self.settle()
            await json_answer(self.whole())(scope, receive, send)

    @property
    def _complete(self) -> bool:
        """False if the client has disconnected."""
        ends = [completion.finish for completion in self.completions]
        return bool(ends) and not {None, "cancelled", "error"} & {*ends}

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
                body = b"".join(map(self.encode, events))
                await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            async for number, piece in self._pieces():
                if not begun:
                    await give(self.first())
                await give(self.piece(number, piece))
            if not self._complete:
                return
            if not begun:  # max_tokens was 0
                await give(self.first())
            await self.settle()
            await give(self.last())
            await send({"type": "http.response.body", "body": self.end, "more_body": False})
        except CtxReuseError as error:
            if not begun:
                raise
            await send({"type": "http.response.body", "body": self.failure(api_error(error))})


class OpenAiAnswer(HttpAnswer):
    """Answers of ``/v1``: with an id, and with usage in the events if the request wants it."""

    def __init__(
        self, node: EdgeNode, model: ServedModel, body: SamplingFields, prefix: str, make: Make, keep_alive: KeepAlive
    ) -> None:
        """``make`` computes the answers with the given id, which begins with ``prefix``; see `running_answer`."""
        name = new_id(prefix)
        super().__init__(node, running_answer(node, model, body, name, make, keep_alive), stream=bool(body.stream))
        self._wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        #: id, time of creation and model, in the order of the API's structs.
        self.head = name, int(time.time()), model.name.id
        self._requested, self._model = body, model
        #: The pieces of each answer, where its choice is made of their log-probabilities.
        self._given: list[list[GeneratedToken]] = [[] for _ in range(body.answers)]
        self._reporters: dict[int, LogprobReporter] = {}

    @property
    @abstractmethod
    def prompt(self) -> Prompt | None:
        """The prompt, as soon as it was made."""

    async def settle(self) -> None:
        """Take the request's KV hints: they are on the context that the answer leaves."""
        hints, prompt = self._requested.kv_hints, self.prompt
        if hints is not None and prompt is not None:
            ids = as_tokens(np.concatenate([prompt.ids, as_tokens(self.completions[0].tokens)]))
            await asyncio.to_thread(take_hints, self._node, self._model.runtime, read_hints(hints), ids)

    @cached_property
    def fingerprint(self) -> str:
        """What answers depend on: the model space, as 16 hex digits."""
        return self._model.runtime.space.digest.hex()[:16]

    @property
    def usage(self) -> ApiUsage:
        """What all answers cost: the prompt once."""
        return usage_of(total_usage([completion.usage for completion in self.completions]))

    @property
    def chosen(self) -> list[tuple[int, Any]]:
        """The numbers of the answers that are given, with the reports on their tokens: the likeliest, by the mean
        log-probability of their tokens, where more were made."""
        count, numbers = self._requested.n or 1, list(range(len(self._given)))
        if count < len(numbers):
            numbers = sorted(numbers, key=lambda number: -mean_logprob(self._given[number]))[:count]
        return [(number, self.logprobs(number, self._given[number])) for number in numbers]

    def logprobs(self, number: int, pieces: Sequence[GeneratedToken]) -> Any:
        """Return the report on the next ``pieces`` of an answer; None if none is wanted."""
        if not self._requested.wants_logprobs:
            return None
        if number not in self._reporters:
            self._reporters[number] = self.reporter(self._requested.listed_logprobs)
        return self.report(self._reporters[number], pieces)

    def reporter(self, count: int) -> LogprobReporter:
        """Return one that names the ``count`` likeliest tokens in each place."""
        text = self._model.runtime.text
        assert text is not None
        return LogprobReporter(text, count)

    @abstractmethod
    def report(self, reporter: LogprobReporter, pieces: Sequence[GeneratedToken]) -> Any:
        """Return the report on pieces in the API's form."""

    @abstractmethod
    def event(
        self, content: str | None, finish: str | None, usage: Usages, number: int = 0, logprobs: Any = None
    ) -> Any:
        """Return an event with a piece of content of an answer, or None: without a choice."""

    def piece(self, number: int, piece: GeneratedToken) -> Sequence[Any]:
        """See `HttpAnswer.piece`."""
        if self._requested.reported_logprobs:
            self._given[number].append(piece)
        logprobs = self.logprobs(number, [piece]) if self._stream else None
        return [self.event(piece.text, None, self.no_usage, number, logprobs)] if piece.text or logprobs else []

    def last(self) -> Sequence[Any]:
        """See `HttpAnswer.last`."""
        ends = [self.finish(number) for number in range(len(self.completions))]
        events = [self.event("", finish, self.no_usage, number) for number, finish in enumerate(ends)]
        if self._wants_usage:
            return [*events, self.event(None, None, self.usage)]
        return [*events[:-1], self.event("", ends[-1], self.usage, len(ends) - 1)]

    def finish(self, number: int) -> str:
        """Return the API's finish reason of an answer."""
        return finish_of(self.completions[number])

    @property
    def no_usage(self) -> msgspec.UnsetType | None:
        """The usage of events that have none: null if the request wants usage, else left out."""
        return None if self._wants_usage else msgspec.UNSET
