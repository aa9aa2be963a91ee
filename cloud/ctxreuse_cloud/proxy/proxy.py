"""The proxy: an ASGI application for ``/v1`` in front of one or more OpenAI-compatible servers.

Life of a request: authentication (401), admission (429), body (413, 400), choice of a backend, and then the answer as
it comes. Nothing is sent to the caller before a backend has sent the first byte of a good answer, so until then another
one may be tried; afterwards an answer that breaks off ends with an error that a client can read.
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

from ctxreuse.bus.log_limit import LimitedLog
from ctxreuse.config import CloudConfig
from ctxreuse.daemon.access import from_here, is_forwarded
from ctxreuse.daemon.bodies import BodyBudget, NoRoomError
from ctxreuse.daemon.broken import last_piece
from ctxreuse.daemon.key_file import ApiKey
from ctxreuse.daemon.keys import KeyEndedError
from ctxreuse.daemon.middleware import request_id
from ctxreuse.daemon.openai import ApiError
from ctxreuse.errors import FormatError
from ctxreuse_cloud.proxy.admission import Admission
from ctxreuse_cloud.proxy.backends import Backends
from ctxreuse_cloud.proxy.forward import Forwarder, ProxyCall
from ctxreuse_cloud.proxy.http import (
    REQUEST_ID,
    DisconnectedError,
    Receive,
    TooLargeError,
    cancel_on_disconnect,
    read_body,
)
from ctxreuse_cloud.proxy.observers import Observers
from ctxreuse_cloud.proxy.request import parse_request
from ctxreuse_cloud.proxy.retry import FailedError
from ctxreuse_cloud.proxy.stream import CallerAnswer, Send, StalledError, error_body
from ctxreuse_cloud.proxy.tenants import Tenants

__all__ = ["Proxy", "Scope"]

limited = LimitedLog(logging.getLogger(__name__))

Scope: TypeAlias = MutableMapping[str, Any]

_JSON = (b"content-type", b"application/json")
#: Paths that are passed on. With ``..`` or an escape, the backend could take it for another route than we do, such as
#: one that only its operator may use.
_PATH = re.compile(r"/v1(?:/(?!\.\.?(?:/|\Z))[A-Za-z0-9._~:@+,=-]+)+")


class _RefusedError(Exception):
    """A request that is refused without a backend."""

    def __init__(self, status: int, message: str, kind: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status, self.kind, self.headers = status, kind, list(headers)


class Proxy:
    """Serves requests under ``/v1``; for one event loop. ``pool`` and the observers stay the caller's to close."""

    def __init__(
        self,
        config: CloudConfig,
        backends: Backends,
        tenants: Tenants,
        pool: aiohttp.ClientSession,
        observers: Observers,
        bodies: BodyBudget,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.bodies = bodies
        self._config, self._backends, self._tenants, self._clock = config, backends, tenants, clock
        self.observers = observers
        self._forward = Forwarder(backends, pool, observers.counts, attempts=config.attempts, clock=clock)
        self._all, self._tenant = Admission(config.max_waiting), Admission(config.tenant_requests)

    @property
    def running(self) -> int:
        """Number of running requests."""
        return self._all.running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request whose path begins with ``/v1/``."""
        started = self._clock()
        given = dict(scope["headers"])
        call = ProxyCall(
            scope["path"], scope.get("query_string", b""), scope["headers"], request_id(given.get(REQUEST_ID, b""))
        )
        answer = CallerAnswer(send, self._config.silence)
        try:
            async with answer:
                await self._respond(scope["method"], receive, given, call, answer)
        except DisconnectedError:
            call.outcome = "cancelled"
        except StalledError as stalled:
            call.outcome = "stalled"
            text, extra = "an answer was cancelled: %s", {"request": call.identity}
            limited.write(call.tenant, logging.WARNING, text, stalled, extra=extra)
        self.observers.end(call, started, self._clock())

    async def _respond(
        self, method: str, receive: Receive, given: dict[bytes, bytes], call: ProxyCall, answer: CallerAnswer
    ) -> None:
        """Answer; an error becomes an answer, too."""
        own = [_JSON, (REQUEST_ID, call.identity.encode())]
        try:
            await self._answer(method, receive, given, call, answer)
        except KeyEndedError as ended:
            call.outcome = "revoked"
            error = ApiError(401, str(ended), type="authentication_error", code="invalid_api_key")
            if not answer.begun:
                await answer.whole(401, own, error.body())
            elif not answer.over and (last := last_piece(error, call.path, answer.media, call.identity)) is not None:
                await answer.end(last)  # otherwise the server cuts the connection
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
        self, method: str, receive: Receive, given: dict[bytes, bytes], call: ProxyCall, answer: CallerAnswer
    ) -> None:
        key = self._tenants.find(call.headers)
        if key is None:
            challenge = (b"www-authenticate", b"Bearer")
            raise _RefusedError(
                401,
                "a valid API key is required: Authorization: Bearer …",
                "invalid_api_key",
                challenge,
            )
        if "answers" not in key.scopes:
            raise _RefusedError(403, "this key has not the scope answers", "permission_error")
        host, origin = (given.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        if self._tenants.open and (not from_here(host, origin) or is_forwarded(given.items())):
            raise _RefusedError(403, "without API keys only programs of this machine are served", "permission_error")
        if not self._backends.all:
            raise _RefusedError(503, "no backend is configured: this node only serves its bus", "no_backend")
        if method == "GET":
            body = self._models(call.path)
            await answer.whole(200, [_JSON, (REQUEST_ID, call.identity.encode())], msgspec.json.encode(body))
        elif method == "POST":
            if not _PATH.fullmatch(call.path):
                raise _RefusedError(404, "no such path", "not_found_error")
            await self._limited(receive, given, key, call, answer)
        else:
            raise _RefusedError(
                405, "only GET and POST are supported", "invalid_request_error", (b"allow", b"GET, POST")
            )

    async def _limited(
        self, receive: Receive, given: dict[bytes, bytes], key: ApiKey, call: ProxyCall, answer: CallerAnswer
    ) -> None:
        """Answer within the limits of a key, until that ends. Raises KeyEndedError."""
        rates = self._tenants.rates(key)
        try:
            rates.begin()
        except ApiError as early:
            after = (b"retry-after", str(early.retry_after).encode())
            raise _RefusedError(429, early.message, early.type, after, *rates.headers()) from None
        answer.extra = [*rates.headers()]
        tenant = key.tenant
        with self._all.enter("") as room, self._tenant.enter(tenant) as allowed:
            if not (room and allowed):
                scope = "your " if room else ""
                raise _RefusedError(429, f"too many of {scope}requests run", "rate_limit_error", (b"retry-after", b"1"))
            with (
                self.bodies.body(None if self._tenants.open else tenant) as take,
                self._tenants.watch(key) as watched,
            ):
                try:
                    await self._post(receive, take, given, tenant, call, answer)
                except asyncio.CancelledError:
                    if watched is None or not watched.was_cancelled():
                        raise
                    raise KeyEndedError from None
                finally:
                    rates.spend(call.spent(answer.nbytes))

    def _models(self, path: str) -> dict[str, Any]:
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": owner} for name, owner in self._backends.models()
        ]
        if path == "/v1/models":
            return {"object": "list", "data": listed}
        for model in listed:
            if path == f"/v1/models/{model['id']}":
                return model
        raise _RefusedError(404, f"no such path: {path[:200]}", "not_found_error")

    async def _post(
        self,
        receive: Receive,
        take: Callable[[int], None],
        given: dict[bytes, bytes],
        tenant: str,
        call: ProxyCall,
        answer: CallerAnswer,
    ) -> None:
        limit, length = self._config.max_body, given.get(b"content-length", b"")
        try:
            body = await read_body(receive, length, take, limit=limit, timeout=self.bodies.seconds)
            form = given.get(b"content-type", b"").lower().startswith(b"multipart/")
            call.request = parse_request(body, tenant, opaque=form and "completions" not in call.path)
        except TooLargeError:
            message = f"the request is larger than {limit} bytes"
            raise _RefusedError(413, message, "invalid_request_error", (b"connection", b"close")) from None
        except TimeoutError:
            raise _RefusedError(408, "the request did not arrive in time", "invalid_request_error") from None
        except NoRoomError as full:
            status, kind = (429, "rate_limit_error") if full.mine else (503, "server_error")
            raise _RefusedError(status, str(full), kind, (b"retry-after", b"1")) from None
        except FormatError as error:
            raise _RefusedError(400, error.what, "invalid_request_error") from None
        call.tenant, call.salt = tenant, self._tenants.salt(tenant)
        self.observers.begin(call, self._clock())
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(cancel_on_disconnect(receive, task, lambda: answer.over))
        try:
            await self._forward.send(call, answer)
        except asyncio.CancelledError:
            if watcher.done() and not watcher.cancelled() and watcher.result() and not task.uncancel():
                raise DisconnectedError from None
            raise  # the server is being stopped
        finally:
            watcher.cancel()
