"""The proxy itself: an ASGI application for ``/v1``, in front of one or more OpenAI-compatible servers.

The life of a request: who asks (401), how much of it already runs (429), the body (413, 400), which backend, and then
its answer as it comes. Nothing is sent to the caller before a backend has sent the first byte of a good answer, so
until then another one may be tried; afterwards an answer that breaks off ends with an error that a client can read.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, MutableMapping
from typing import Any, TypeAlias

import aiohttp
import msgspec

from ctxreuse.config import CloudConfig
from ctxreuse.daemon.front import from_here
from ctxreuse.errors import FormatError
from ctxreuse.lab.recorder import Recorder
from ctxreuse_cloud.proxy.admission import Admission
from ctxreuse_cloud.proxy.asked import read_asked
from ctxreuse_cloud.proxy.backends import Backends
from ctxreuse_cloud.proxy.body import GoneError, Receive, TooLargeError, cancel_when_gone, read_body
from ctxreuse_cloud.proxy.counts import ProxyCounts
from ctxreuse_cloud.proxy.forward import Call, Forward
from ctxreuse_cloud.proxy.headers import REQUEST_ID, request_id
from ctxreuse_cloud.proxy.pauses import PauseBook, stop_of
from ctxreuse_cloud.proxy.retry import FailedError
from ctxreuse_cloud.proxy.stream import Answer, Counted, Send, StalledError, error_body
from ctxreuse_cloud.proxy.tenants import Tenants
from ctxreuse_cloud.proxy.why import AskedBook

__all__ = ["Proxy", "Scope"]

log = logging.getLogger(__name__)

Scope: TypeAlias = MutableMapping[str, Any]

_JSON = (b"content-type", b"application/json")
#: Paths that are passed on. One with ``..`` or an escape in it could mean another route to the backend than to us, such
#: as one that its operator only keeps for himself.
_PATH = re.compile(r"/v1(?:/(?!\.\.?(?:/|\Z))[A-Za-z0-9._~:@+,=-]+)+")


class _RefusedError(Exception):
    """An answer that no backend has to do with."""

    def __init__(self, status: int, message: str, kind: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status, self.kind, self.headers = status, kind, list(headers)


class Proxy:
    """Requests under ``/v1``. One event loop calls. ``pool``: see ``connections``; ``recorder``: records requests. Both
    stay the caller's to close."""

    def __init__(
        self,
        config: CloudConfig,
        backends: Backends,
        tenants: Tenants,
        pool: aiohttp.ClientSession,
        counts: ProxyCounts,
        clock: Callable[[], float] = time.perf_counter,
        recorder: Recorder | None = None,
        asked: AskedBook | None = None,
        pauses: PauseBook | None = None,
    ) -> None:
        self._pauses = pauses
        #: What was asked of late, for those who ask why it was computed anew.
        self.asked = asked if asked is not None else AskedBook()
        self._recorder = recorder
        self._config, self._backends, self._tenants, self._counts, self._clock = (
            config,
            backends,
            tenants,
            counts,
            clock,
        )
        self._forward = Forward(backends, pool, counts, attempts=config.attempts, clock=clock)
        self._node, self._tenant = Admission(config.max_waiting), Admission(config.tenant_requests)

    @property
    def running(self) -> int:
        """Requests under way."""
        return self._node.running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request whose path begins with ``/v1/``."""
        started = self._clock()
        given = dict(scope["headers"])
        call = Call(scope["path"], scope.get("query_string", b""), scope["headers"], request_id(given.get(REQUEST_ID)))
        answer = Answer(send, self._config.silence)
        try:
            async with answer:
                await self._respond(scope["method"], receive, given, call, answer)
        except GoneError:
            call.outcome = "cancelled"
        except StalledError as stalled:
            call.outcome = "stalled"
            log.warning("an answer was given up: %s", stalled, extra={"request": call.identity})
        first = None if call.first is None else call.first - started
        self._counts.ended(call.outcome, first, self._clock() - started)
        if call.outcome == "ok" and call.tail and self._pauses is not None:
            self._pauses.paused(call.conversation, stop_of(call.tail), self._clock())
        if call.outcome == "ok" and call.tried:
            usage = call.usage or Counted()
            tokens = usage.prompt_tokens, usage.cached
            self.asked.note(
                call.identity, call.tenant, call.asked.model, call.tried[-1].name, tokens, call.asked.named()
            )
        if self._recorder is not None:
            self._recorder.ended(call.recorded, busy=self._clock() - started)

    async def _respond(
        self, method: str, receive: Receive, given: dict[bytes, bytes], call: Call, answer: Answer
    ) -> None:
        """Answer, if only with an error."""
        own = [_JSON, (REQUEST_ID, call.identity.encode())]
        try:
            await self._answer(method, receive, given, call, answer)
        except _RefusedError as refused:
            call.outcome = "refused"
            body = error_body(str(refused), refused.kind, refused.status)
            await answer.whole(refused.status, [*own, *refused.headers], body)
        except FailedError as failed:
            call.outcome = "failed"
            headers, body = failed.answer or (own, error_body(str(failed), "upstream_error", failed.status))
            if failed.wait and failed.answer is None:
                headers = [*headers, (b"retry-after", str(math.ceil(failed.wait)).encode())]
            await answer.whole(failed.status, headers, body)

    async def _answer(
        self, method: str, receive: Receive, given: dict[bytes, bytes], call: Call, answer: Answer
    ) -> None:
        tenant = self._tenants.find(given.get(b"authorization"))
        if tenant is None:
            challenge = (b"www-authenticate", b"Bearer")
            raise _RefusedError(401, "this API wants a key: Authorization: Bearer …", "invalid_api_key", challenge)
        host, origin = (given.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        if self._tenants.open and not from_here(host, origin):
            raise _RefusedError(403, "without keys only programs of this machine are served", "permission_error")
        if not self._backends.all:
            raise _RefusedError(503, "no backend is configured: this node serves its bus only", "no_backend")
        if method == "GET":
            body = self._models(call.path)
            await answer.whole(200, [_JSON, (REQUEST_ID, call.identity.encode())], msgspec.json.encode(body))
        elif method == "POST":
            if not _PATH.fullmatch(call.path):
                raise _RefusedError(404, "nothing is at this path", "not_found_error")
            with self._node.enter("") as room, self._tenant.enter(tenant) as allowed:
                if not (room and allowed):
                    whose = "of yours " if room else ""
                    raise _RefusedError(
                        429, f"too many requests {whose}at once", "rate_limit_error", (b"retry-after", b"1")
                    )
                await self._post(receive, given, tenant, call, answer)
        else:
            raise _RefusedError(405, "only GET and POST are here", "invalid_request_error", (b"allow", b"GET, POST"))

    def _models(self, path: str) -> dict[str, Any]:
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": owner} for name, owner in self._backends.models()
        ]
        if path == "/v1/models":
            return {"object": "list", "data": listed}
        for model in listed:
            if path == f"/v1/models/{model['id']}":
                return model
        raise _RefusedError(404, f"nothing is at {path[:200]}", "not_found_error")

    async def _post(self, receive: Receive, given: dict[bytes, bytes], tenant: str, call: Call, answer: Answer) -> None:
        limit, length = self._config.max_body, given.get(b"content-length", b"")
        try:
            body = await read_body(receive, length, limit=limit, timeout=self._config.silence)
            form = given.get(b"content-type", b"").lower().startswith(b"multipart/")
            call.asked = read_asked(body, tenant, opaque=form and "completions" not in call.path)
        except TooLargeError:
            message = f"the request is larger than {limit} bytes"
            raise _RefusedError(413, message, "invalid_request_error", (b"connection", b"close")) from None
        except TimeoutError:
            raise _RefusedError(408, "the request did not come in time", "invalid_request_error") from None
        except FormatError as error:
            raise _RefusedError(400, error.what, "invalid_request_error") from None
        call.tenant, call.salt = tenant, self._tenants.salt(tenant)
        if self._recorder is not None and (parts := call.asked.parts()):
            scope = b"\0".join((tenant.encode(), call.asked.model.encode("utf-8", "surrogatepass")))
            call.recorded = self._recorder.text(parts, scope)
        if self._pauses is not None:
            call.conversation = self._pauses.begun(tenant, call.asked.model, call.asked.named(), self._clock())
        task = asyncio.current_task()
        assert task is not None
        gone = asyncio.create_task(cancel_when_gone(receive, task, lambda: answer.over))
        try:
            await self._forward.send(call, answer)
        except asyncio.CancelledError:
            if gone.done() and not gone.cancelled() and gone.result() and not task.uncancel():
                raise GoneError from None
            raise  # the server is being stopped
        finally:
            gone.cancel()
