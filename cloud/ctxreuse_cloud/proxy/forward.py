"""Forward a request to backends: attempts until one begins to answer, then its answer as it comes."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

import aiohttp

from ctxreuse.bus.log_limit import LimitedLog
from ctxreuse.daemon.broken import last_piece
from ctxreuse.daemon.middleware import KV_HINTS
from ctxreuse.daemon.openai import ApiError
from ctxreuse.pauses.envelope import summary
from ctxreuse.routing import PrefixRun, PromptTokens, Route
from ctxreuse_cloud.proxy.backends import Backend, Backends
from ctxreuse_cloud.proxy.counts import ProxyCounts
from ctxreuse_cloud.proxy.http import RawHeaders, answer_headers, request_headers
from ctxreuse_cloud.proxy.kv_hints import HINTS_PATH, NO_HINTS, sent_to
from ctxreuse_cloud.proxy.reported import ReportedUsage, usage_of
from ctxreuse_cloud.proxy.request import EMPTY_REQUEST
from ctxreuse_cloud.proxy.retry import PATIENCE, Budget, FailedError, pause, repeatable, retry_after, retry_status
from ctxreuse_cloud.proxy.stored import StoredObjects, id_of_answer, stored_id
from ctxreuse_cloud.proxy.stream import (
    EVENTS,
    LINES,
    CallerAnswer,
    error_body,
    pass_on,
    read_whole,
)

__all__ = ["COUNTING", "Forwarder", "ProxyCall"]

limited = LimitedLog(logging.getLogger(__name__))

#: Bytes kept of the end of an answer.
_TAIL = 1 << 15
#: Bytes kept of a backend's error.
_ERROR = 1 << 16
#: Seconds in which backends say whether they have something stored.
_ASKING = 5.0
#: Routes that compute nothing.
COUNTING = frozenset(
    ("/tokenize", "/detokenize", "/api/show", "/v1/messages/count_tokens", "/v1/responses/input_tokens", HINTS_PATH)
)


class ProxyCall:
    """One request: what is sent, which backends were tried, and how it ended."""

    def __init__(self, method: str, path: str, query: bytes, headers: RawHeaders, identity: str) -> None:
        self.method, self.path, self.headers, self.identity = method, path, headers, identity
        self.target = f"{path}?{query.decode('latin-1')}" if query else path
        #: The body, and the ``cache_salt`` for backends that take one.
        self.request, self.salt = EMPTY_REQUEST, ""
        #: Its KV hints; at the backend that was tried last, what became of them and whether it was sent one of ours.
        self.hints, self.hinted, self.made_hint = NO_HINTS, list[str](), False
        #: What the router knows it by (none: it computes no prompt), and why the last backend was chosen.
        self.runs: Sequence[PrefixRun] = ()
        #: Those of its chat's request before this one, where a backend takes only sessions.
        self.earlier: Sequence[PrefixRun] = ()
        #: Its tokens, where a backend's KV events can be compared with them.
        self.prompt: PromptTokens | None = None
        self.route: Route | None = None
        self.tried: list[Backend] = []
        #: The only backend that has what the request builds on; None: any may answer.
        self.place: Backend | None = None
        #: Its tenant, and the usage that the backend reported.
        self.tenant = ""
        self.usage: ReportedUsage | None = None
        #: Time of the first byte of the answer.
        self.first: float | None = None
        #: One of ``counts.OUTCOMES``.
        self.outcome = "ok"
        #: End of a good answer, which has the stop reason.
        self.tail = b""
        #: The conversation as `PauseTracker` knows it.
        self.conversation = b""
        #: Its number in the recording, -1: not recorded.
        self.recorded = -1

    @property
    def stores(self) -> bool:
        """True if the answer has the id of something that the backend stores."""
        collection, identity = stored_id(self.path)
        return self.method == "POST" and bool(collection) and not identity and self.request.stores

    def spent(self, nbytes: int) -> int:
        """Return the tokens that were computed: of the prompt without what was cached, and of the answer.

        Where the backend did not report them, one for each four bytes of the request and of the answer's ``nbytes``.
        """
        if not self.tried or self.method != "POST" or self.path in COUNTING:
            return 0
        if self.usage is None:
            return (len(self.request.body("")) + nbytes) // 4
        return max(0, self.usage.prompt_tokens - self.usage.cached) + self.usage.completion_tokens


class Forwarder:
    """Sends calls to backends; for one event loop."""

    def __init__(
        self,
        backends: Backends,
        pool: aiohttp.ClientSession,
        counts: ProxyCounts,
        stored: StoredObjects,
        *,
        attempts: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backends, self._pool, self._counts, self._attempts, self._clock = backends, pool, counts, attempts, clock
        self._budget, self._stored = Budget(), stored
        self._rng = random.Random()

    async def send(self, call: ProxyCall, answer: CallerAnswer) -> None:
        """Answer a call. Raises FailedError if no backend began to answer."""
        self._budget.request()
        while True:
            try:
                await self._attempt(call, answer)
                return
            except FailedError as failed:
                wait = self._again(call, failed)
                if wait is None:
                    raise
            await asyncio.sleep(wait)

    def _again(self, call: ProxyCall, failed: FailedError) -> float | None:
        """Return the seconds to wait before the next attempt; None: no further attempt."""
        n = len(call.tried)
        again = repeatable(call.method, call.path, stores=call.request.stores)
        if (failed.sent and not again) or failed.wait > PATIENCE or n >= self._attempts:
            return None
        following = self._choose(call)
        if following is None or not self._budget.take():
            return None
        # No wait before a backend that has not been tried yet.
        return failed.wait or pause(n, self._rng) if following[0] in call.tried else 0.0

    def _choose(self, call: ProxyCall) -> tuple[Backend, Route | None] | None:
        if call.place is not None:
            return (call.place, None) if call.place.ready() else None
        request = call.request
        return self._backends.choose(request.model, request.context, call.tried, call.runs, call.prompt, call.earlier)

    async def find(self, path: str) -> Backend | None:
        """Ask all backends for something stored, such as ``/v1/responses/ID``, and return the one that has it."""

        async def ask(backend: Backend) -> bool:
            headers = {"authorization": f"Bearer {backend.key}"} if backend.key else {}
            try:
                async with (
                    asyncio.timeout(_ASKING),
                    self._pool.get(backend.url + path, headers=headers, allow_redirects=False) as response,
                ):
                    return response.status == 200
            except (aiohttp.ClientError, TimeoutError, OSError):
                return False

        places = [backend for backend in self._backends.all if backend.healthy is not False]
        found = await asyncio.gather(*map(ask, places))
        return next((backend for backend, has in zip(places, found) if has), None)

    async def _attempt(self, call: ProxyCall, answer: CallerAnswer) -> None:
        chosen = self._choose(call)
        if chosen is None:
            raise FailedError(503, "no backend is available", wait=max(PATIENCE + 1, self._backends.wait()))
        backend, call.route = chosen
        number = self._backends.begin(call.route, call.runs, streamed=call.request.streams)
        self._counts.tried(backend.name, again=bool(call.tried))
        call.tried.append(backend)
        body = None
        if call.method == "POST":
            hints, call.hinted, call.made_hint = sent_to(backend.config.kv_hints, call.hints, call.identity)
            body = call.request.body(call.salt if backend.config.cache_salt else "", hints)
        headers = request_headers(call.headers, call.identity, backend.key)
        with backend.request():
            try:
                async with self._pool.request(
                    call.method, backend.url + call.target, data=body, headers=headers, allow_redirects=False
                ) as response:
                    await self._take(call, backend, response, answer, number)
            except FailedError as failed:
                # A busy backend is healthy: the breaker is for those that do not answer.
                if failed.status != 429:
                    self._failed(call, backend, str(failed))
                raise
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = str(error) or type(error).__name__
                self._failed(call, backend, reason)
                connecting = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
                late = isinstance(error, TimeoutError)
                raise FailedError(504 if late else 502, f"the backend failed: {reason}", sent=not connecting) from None
            finally:
                self._backends.no_answer(number)

    def _failed(self, call: ProxyCall, backend: Backend, reason: str) -> None:
        backend.failed()
        self._counts.failed(backend.name)
        extra = {"backend": backend.name, "request": call.identity, "error": reason[:500]}
        limited.write(call.tenant, logging.WARNING, "a backend failed", extra=extra)

    async def _take(
        self, call: ProxyCall, backend: Backend, response: aiohttp.ClientResponse, answer: CallerAnswer, number: int
    ) -> None:
        """Pass one answer on; raises only before anything was sent."""
        raw, status = response.raw_headers, response.status
        headers = answer_headers(raw, call.identity)
        if call.hints.envelope is not None:
            headers.append((KV_HINTS.encode(), summary(call.hinted).encode()))
        if retry_status(status):
            body, whole = await read_whole(response, _ERROR)
            wait = retry_after(response.headers) or 0.0
            kept = (headers, body) if whole else None
            raise FailedError(status, f"{backend.name} answers {status}", sent=status >= 500, wait=wait, answer=kept)
        framing = {"text/event-stream": EVENTS, "application/x-ndjson": LINES}.get(response.content_type, b"")
        if framing:
            first, whole = await _first(response, framing), False
        else:
            first, whole = await read_whole(response)
        if call.stores and status == 200 and (identity := id_of_answer(first)):
            self._stored.note(identity, call.tenant, backend.name)
        backend.succeeded()
        call.first = self._clock()
        if status < 400:
            self._backends.first_byte(number, streamed=bool(framing))
            self._counts.hinted(call.hinted, made=call.made_hint)
        else:
            call.outcome = "upstream"
        if whole:
            await answer.whole(status, headers, first)
            call.usage = usage_of(first, events=False) if status == 200 else None
            call.tail = first[-_TAIL:] if status == 200 else b""
            self._counts.passed(len(first), call.usage)
            return
        await answer.start(status, headers)
        last = _broken(call, response.content_type)
        passed = await pass_on(response, first, answer, framing=framing, last=last)
        call.usage, call.tail = passed.usage, passed.tail
        self._counts.passed(passed.nbytes, passed.usage)
        if passed.broke:
            call.outcome = "broken"
            self._failed(call, backend, passed.broke)


async def _first(response: aiohttp.ClientResponse, until: bytes) -> bytes:
    """Return the beginning of a stream, at least to the end of its first event."""
    first = await response.content.readany()
    while until not in first and b"\r\n\r\n" not in first and len(first) < _ERROR:
        piece = await response.content.readany()
        if not piece:
            break
        first += piece
    return first


def _broken(call: ProxyCall, media: str) -> bytes:
    """Return the last event of a stream that its backend broke off."""
    text, kind = "the backend broke off during the answer", "upstream_error"
    if media != "text/event-stream" or call.path.startswith(("/v1/messages", "/v1/responses")):
        return last_piece(ApiError(502, text, type=kind, code=kind), call.path, media, call.identity) or b""
    return b"data: " + error_body(text, kind, 502) + b"\n\n"
