"""ASGI middleware of the daemons: authentication, request ids, errors, logs and metrics of requests."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from contextvars import ContextVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctxreuse.bus.log_limit import LimitedLog
from ctxreuse.daemon import logs
from ctxreuse.daemon.access import Access, KnownKey
from ctxreuse.daemon.bodies import BodyBudget, NoRoomError
from ctxreuse.daemon.broken import last_piece
from ctxreuse.daemon.keys import KeyEndedError
from ctxreuse.daemon.openai import ApiError, api_error
from ctxreuse.daemon.page.routes import FILES
from ctxreuse.daemon.probes import PROBES
from ctxreuse.errors import CtxReuseError
from ctxreuse.metrics import Metrics

__all__ = ["CALLER", "IGNORED_FIELDS", "KV_HINTS", "ApiMiddleware", "new_id", "read_body", "request_id", "spend"]

log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: Header of an answer: fields of the request that mean nothing here, such as misspelt ones.
IGNORED_FIELDS = "x-ctxreuse-ignored-fields"
#: Header that says how many of a request's KV hints were taken, and how many were ignored and why.
KV_HINTS = "x-ctxreuse-kv-hints"

#: Whose key the request that is being served has, "" where none is required: whose share it takes.
CALLER: ContextVar[str] = ContextVar("caller", default="")

_MAX_BODIES, _RECEIVE = 256 << 20, 30.0
# Seconds for a client to take the error at the end of its answer.
_LAST = 5.0
_TYPE = b"content-type"
_CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")


def new_id(prefix: str = "req") -> str:
    """Return a random id, such as ``chatcmpl-5f…``."""
    import secrets

    return f"{prefix}-{secrets.token_hex(12)}"


def request_id(header: bytes) -> str:
    """Return the caller's request id if it is safe for logs and headers, else a new one."""
    text = header.decode("latin-1")
    return text if _ID.fullmatch(text) else new_id()


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body. Raises ApiError (413) as soon as it exceeds ``limit`` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ApiError(413, f"the request has more than {limit:,} bytes", code="request_too_large")
        parts.append(part)
    return b"".join(parts)


class ApiMiddleware:
    """ASGI middleware around a `starlette.routing.Router`; errors of routes become answers of the OpenAI API.

    Args:
        app: the router.
        metrics: counts requests.
        route: maps a path to one of few names for metrics.
        not_ready: why API requests are refused with 503 now; "": ready.
        access: who is served.
        bodies: memory and time for request bodies.
        errors: the body of an error, of a request's path and id: other APIs than OpenAI's have other forms.
        clock: seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        route: Callable[[str], str],
        not_ready: Callable[[], str] = lambda: "",
        access: Access | None = None,
        bodies: BodyBudget | None = None,
        errors: Callable[[ApiError, str, str], bytes] = lambda error, path, identity: error.body(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app, self._metrics, self._route, self._not_ready = app, metrics, route, not_ready
        self._access, self._clock = access if access is not None else Access(), clock
        self._refused, self._errors = LimitedLog(log), errors
        self._bodies = bodies if bodies is not None else BodyBudget(_MAX_BODIES, _RECEIVE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']} is not supported")
        identity = request_id(_header(scope, b"x-request-id").encode("latin-1"))
        scope.setdefault("state", {})["request_id"] = identity
        scope["app"] = self._app  # makes a bare router raise what it would answer as plain text
        started, status, media, over = self._clock(), 0, "", False

        async def answer(message: Message) -> None:
            nonlocal status, media, over
            if message["type"] == "http.response.start":
                status = message["status"]
                media = next((value.decode("latin-1") for name, value in message["headers"] if name == _TYPE), "-")
                names = (b"x-request-id", b"request-id")  # OpenAI's and Anthropic's
                message["headers"] = [*message["headers"], *((name, identity.encode()) for name in names)]
                if ignored := scope["state"].get("ignored"):
                    message["headers"].append((IGNORED_FIELDS.encode(), ignored.encode()))
                if status < 400 and (hints := scope["state"].get("kv_hints")):
                    message["headers"].append((KV_HINTS.encode(), hints.encode()))
                if (known := _known(scope)) is not None:
                    message["headers"] += known.keys.rates(known.key).headers()
            over = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        with logs.fields(request_id=identity):
            try:
                self._admit(scope)
                await self._served(scope, receive, answer)
            except ClientDisconnect:
                status = status or 499
            except Exception as error:
                refusal = self._refusal(error, scope)
                if not status:
                    await refuse(refusal, answer, self._errors(refusal, scope["path"], identity))
                elif not over:
                    last = None
                    if isinstance(error, ApiError):
                        last = last_piece(refusal, scope["path"], media, identity)
                    if last is None:
                        # Only closing the connection can mark the answer as incomplete.
                        raise
                    async with asyncio.timeout(_LAST):
                        await send({"type": "http.response.body", "body": last})
            finally:
                path = scope["path"]
                self._metrics.add("ctxreuse_http_requests_total", 1, self._route(path), _CLASSES[status // 100 - 1])
                level = logging.DEBUG if path in PROBES or path in FILES else logging.INFO
                seconds = round(self._clock() - started, 4)
                extra: dict[str, object] = {"status": status, "seconds": seconds}
                if (known := _known(scope)) is not None:
                    extra["key"] = known.key.tenant
                if status < 400:
                    log.log(level, "%s %s", scope["method"], path, extra=extra)
                else:  # these cost a caller nothing
                    self._refused.write(_caller(scope), level, "%s %s", scope["method"], path, extra=extra)

    async def _served(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an admitted request within the limits of its key, until that ends."""
        known = _known(scope)
        CALLER.set(known.key.tenant if known is not None else "")
        with self._bodies.body(known.key.tenant if known is not None else None) as take:
            if known is None:
                await self._app(scope, self._receiver(receive, take), send)
                return
            if scope["path"] not in PROBES:
                known.keys.rates(known.key).begin()
            with known.keys.watch(known.key) as watched:
                try:
                    await self._app(scope, self._receiver(receive, take), send)
                except asyncio.CancelledError:
                    if not watched.was_cancelled():
                        raise  # the daemon is being stopped
                    text = str(KeyEndedError())
                    raise ApiError(401, text, type="authentication_error", code="invalid_api_key") from None

    def _admit(self, scope: Scope) -> None:
        self._access.admit(scope)
        why = "" if scope["path"] in PROBES or scope["path"] in FILES else self._not_ready()
        if why:
            raise ApiError(503, f"the daemon is {why}", type="server_error", code=why, retry_after=1)

    def _receiver(self, receive: Receive, take: Callable[[int], None]) -> Receive:
        """Return ``receive`` with the limits of bodies, as ApiErrors (408, 429, 503)."""
        seconds, whole = self._bodies.seconds, False
        deadline = asyncio.get_running_loop().time() + seconds

        async def limited() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                text = f"the request's body did not arrive within {seconds:g} s"
                raise ApiError(408, text, code="request_timeout") from None
            try:
                take(len(message.get("body", b"")))
            except NoRoomError as full:
                status, code = (429, "too_many_requests") if full.mine else (503, "no_memory")
                raise ApiError(status, str(full), type="server_error", code=code, retry_after=1) from None
            whole = not message.get("more_body", False)
            return message

        return limited

    def _refusal(self, error: Exception, scope: Scope) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, HTTPException):
            return ApiError(error.status_code, error.detail, code="no_such_route")
        if isinstance(error, CtxReuseError):
            refusal = api_error(error)
            if refusal.status >= 500:
                self._refused.write(_caller(scope), logging.WARNING, "request failed: %s", error)
            return refusal
        self._refused.write(_caller(scope), logging.ERROR, "request failed", exc_info=error)
        return ApiError(500, "internal error: see the daemon's log", type="server_error")


async def refuse(refusal: ApiError, send: Send, body: bytes) -> None:
    """Send an error as an HTTP answer with this body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.retry_after is not None:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _caller(scope: Scope) -> str:
    """Return whose budget of log lines a request takes: its key's, else its address's."""
    client = scope.get("client")
    return CALLER.get() or (client[0] if client is not None else "")


def _known(scope: Scope) -> KnownKey | None:
    found: KnownKey | None = scope["state"].get("key")
    return found


def spend(scope: Scope, tokens: int) -> None:
    """Count tokens of a request against its key."""
    if (known := _known(scope)) is not None:
        known.keys.rates(known.key).spend(tokens)


def _header(scope: Scope, name: bytes) -> str:
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found.decode("latin-1")
