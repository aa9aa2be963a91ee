"""The proxy: an ASGI application in front of one or more OpenAI-compatible servers, for `is_proxied` paths.

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
from urllib.parse import quote

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
from ctxreuse_cloud.proxy.forward import COUNTING, Forwarder, ProxyCall
from ctxreuse_cloud.proxy.http import (
    REQUEST_ID,
    DisconnectedError,
    Receive,
    TooLargeError,
    cancel_on_disconnect,
    read_body,
)
from ctxreuse_cloud.proxy.kv_hints import HINTS_PATH, hints_alone, read_sent
from ctxreuse_cloud.proxy.observers import Observers
from ctxreuse_cloud.proxy.prompts import PromptReader
from ctxreuse_cloud.proxy.request import parse_request
from ctxreuse_cloud.proxy.retry import PURE, FailedError
from ctxreuse_cloud.proxy.routes import earlier_runs, request_runs
from ctxreuse_cloud.proxy.stored import StoredObjects, is_public, stored_id
from ctxreuse_cloud.proxy.stream import CallerAnswer, Send, StalledError, error_body
from ctxreuse_cloud.proxy.tenants import Tenants

__all__ = ["Proxy", "Scope", "is_proxied"]

limited = LimitedLog(logging.getLogger(__name__))

Scope: TypeAlias = MutableMapping[str, Any]

_JSON = (b"content-type", b"application/json")
#: Requests that may be sent a hint of ours.
_CHAT = "/v1/chat/completions"
#: Paths that are passed on: all below ``/v1``, and those of other APIs that are for callers, not for the operator. With
#: ``..`` or an escape, the backend could take one for another route than we do.
_PATH = re.compile(r"/v1(?:/(?!\.\.?(?:/|\Z))[A-Za-z0-9._~:@+,=-]+)+")
_OTHERS = frozenset(path for path in PURE if not path.startswith("/v1/")) | {
    "/api/ps",
    "/api/tags",
    "/api/version",
    HINTS_PATH,
}


def is_proxied(path: str) -> bool:
    """Return True if a path belongs to the backends, not to this node."""
    return path.startswith("/v1/") or path in _OTHERS


class _RefusedError(Exception):
    """A request that is refused without a backend."""

    def __init__(self, status: int, message: str, kind: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status, self.kind, self.headers = status, kind, list(headers)


class Proxy:
    """Serves requests for backends; for one event loop. ``pool``, ``stored`` and the observers stay the caller's to
    close."""

    def __init__(
        self,
        config: CloudConfig,
        backends: Backends,
        tenants: Tenants,
        pool: aiohttp.ClientSession,
        observers: Observers,
        bodies: BodyBudget,
        stored: StoredObjects | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.bodies, self._stored = bodies, stored or StoredObjects()
        self._config, self._backends, self._tenants, self._clock = config, backends, tenants, clock
        self.observers = observers
        self._forward = Forwarder(backends, pool, observers.counts, self._stored, attempts=config.attempts, clock=clock)
        self._prompts = PromptReader(backends, pool)
        self._makes_hints = any(backend.config.kv_hints == "make" for backend in backends.all)
        self._all, self._tenant = Admission(config.max_waiting), Admission(config.tenant_requests)

    @property
    def running(self) -> int:
        """Number of running requests."""
        return self._all.running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request whose path `is_proxied`."""
        started = self._clock()
        given = dict(scope["headers"])
        identity, query = request_id(given.get(REQUEST_ID, b"")), scope.get("query_string", b"")
        call = ProxyCall(scope["method"], scope["path"], query, scope["headers"], identity)
        answer = CallerAnswer(send, self._config.silence)
        try:
            async with answer:
                await self._respond(receive, given, call, answer)
        except DisconnectedError:
            call.outcome = "cancelled"
        except StalledError as stalled:
            call.outcome = "stalled"
            text, extra = "an answer was cancelled: %s", {"request": call.identity}
            limited.write(call.tenant, logging.WARNING, text, stalled, extra=extra)
        self.observers.end(call, started, self._clock())

    async def _respond(
        self, receive: Receive, given: dict[bytes, bytes], call: ProxyCall, answer: CallerAnswer
    ) -> None:
        """Answer; an error becomes an answer, too."""
        own = [_JSON, (REQUEST_ID, call.identity.encode())]
        try:
            await self._answer(receive, given, call, answer)
        except KeyEndedError as ended:
            call.outcome = "revoked"
            error = ApiError(401, str(ended), type="authentication_error", code="invalid_api_key")
            if not answer.begun:
                body = error_body(error.message, error.type, 401, call.path, call.identity)
                await answer.whole(401, own, body)
            elif not answer.over and (last := last_piece(error, call.path, answer.media, call.identity)) is not None:
                await answer.end(last)  # otherwise the server cuts the connection
        except _RefusedError as refused:
            call.outcome = "refused"
            body = error_body(str(refused), refused.kind, refused.status, call.path, call.identity)
            await answer.whole(refused.status, [*own, *refused.headers], body)
        except FailedError as failed:
            call.outcome = "failed"
            headers, body = failed.answer or (
                own,
                error_body(str(failed), "upstream_error", failed.status, call.path, call.identity),
            )
            if failed.wait and failed.answer is None:
                headers = [*headers, (b"retry-after", str(math.ceil(failed.wait)).encode())]
            await answer.whole(failed.status, headers, body)

    async def _answer(self, receive: Receive, given: dict[bytes, bytes], call: ProxyCall, answer: CallerAnswer) -> None:
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
        if call.method == "GET" and f"{call.path}/".startswith("/v1/models/"):
            listed = self._models(call.path)
            await answer.whole(200, [_JSON, (REQUEST_ID, call.identity.encode())], msgspec.json.encode(listed))
            return
        if call.method not in ("GET", "POST", "DELETE"):
            allowed = (b"allow", b"GET, POST, DELETE")
            raise _RefusedError(405, "only GET, POST and DELETE are supported", "invalid_request_error", allowed)
        if not _PATH.fullmatch(call.path) and call.path not in _OTHERS:
            raise _RefusedError(404, "no such path", "not_found_error")
        await self._limited(receive, given, key, call, answer)

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
                    await self._pass_on(receive, take, given, tenant, call, answer)
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

    async def _find_place(self, call: ProxyCall) -> None:
        """Set the backend that has what the request names: by its answer, or, where no key is required, by asking all.

        Where keys are required, what is not known to be the tenant's own is refused: it may be another's.
        """
        named = [stored_id(call.path), *call.request.continues()]
        if not self._tenants.open and call.method != "POST" and not named[0][1] and not is_public(call.path):
            raise _RefusedError(404, "lists of all tenants are not passed on", "not_found_error")
        for collection, identity in named:
            if not identity:
                continue
            name = self._stored.find(identity, call.tenant)
            place = self._backends.find(name or "")
            if place is None and not self._tenants.open:
                raise _RefusedError(404, f"{identity[:80]!r} is not known here", "not_found_error")
            if place is None and len(self._backends.all) > 1:
                place = await self._forward.find(f"/v1/{collection}/{quote(identity, safe='')}")
                if place is not None:
                    self._stored.note(identity, call.tenant, place.name)
            call.place = call.place or place

    def _find_hinted(self, call: ProxyCall) -> None:
        """Set the backend of the request that hints are about."""
        try:
            name, call.request = hints_alone(call.request, call.tenant)
        except FormatError as error:
            raise _RefusedError(400, error.what, "invalid_request_error") from None
        place = self._backends.find(self.observers.requests.backend(name, call.tenant))
        if place is None:
            raise _RefusedError(404, f"no request {name[:80]!r} is known here", "not_found_error")
        if place.config.kv_hints == "none":
            raise _RefusedError(404, f"{place.name}, which answered it, takes no KV hints", "not_found_error")
        call.place = place

    async def _read(
        self, receive: Receive, take: Callable[[int], None], given: dict[bytes, bytes], tenant: str, call: ProxyCall
    ) -> None:
        """Read the body of a POST request."""
        limit, length = self._config.max_body, given.get(b"content-length", b"")
        try:
            body = await read_body(receive, length, take, limit=limit, timeout=self.bodies.seconds)
            form = given.get(b"content-type", b"").lower().startswith(b"multipart/")
            opaque = form and "completions" not in call.path
            lenient = call.path not in PURE and call.path not in ("/v1/responses", HINTS_PATH)
            call.request = parse_request(body, tenant, opaque=opaque, lenient=lenient)
            call.hints = read_sent(call.request)
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

    async def _pass_on(
        self,
        receive: Receive,
        take: Callable[[int], None],
        given: dict[bytes, bytes],
        tenant: str,
        call: ProxyCall,
        answer: CallerAnswer,
    ) -> None:
        if call.method == "POST":
            await self._read(receive, take, given, tenant, call)
        call.tenant, call.salt = tenant, self._tenants.salt(tenant)
        if len(self._backends.all) > 1 and call.path not in COUNTING:
            messages = call.request.messages()
            call.runs = request_runs(tenant, call.request.model, messages)
            if self._backends.draining:
                call.earlier = earlier_runs(tenant, call.request.model, messages)
            if call.runs and self._backends.router is not None:
                call.prompt = await self._prompts.read(call.path, call.request, call.salt)
        if call.path == HINTS_PATH:
            self._find_hinted(call)
        await self._find_place(call)
        self.observers.begin(call, self._clock())
        if self._makes_hints and call.path == _CHAT and any(name == "tools" for name, _ in call.request.messages()):
            call.hints = call.hints._replace(pause=self.observers.pauses.tool_seconds(tenant))
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
