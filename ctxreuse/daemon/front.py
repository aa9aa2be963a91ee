"""What every request passes first: who asks and may they, under which id, and how it ended, in logs and metrics."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctxreuse.daemon import logs
from ctxreuse.daemon.openai import ApiError, api_error
from ctxreuse.errors import ConfigError, CtxReuseError

__all__ = ["Counting", "Front", "bearer", "from_here", "is_loopback", "new_id", "read_body", "read_keys"]

log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")
_OPEN = ("/healthz", "/health", "/readyz", "/metrics")


class Counting(Protocol):
    """What counts requests: `ctxreuse.metrics.Metrics`."""

    def add(self, name: str, amount: float = 1, *values: str) -> None: ...


def new_id(prefix: str = "req") -> str:
    """A random id, such as ``chatcmpl-5f…``."""
    import secrets

    return f"{prefix}-{secrets.token_hex(12)}"


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def from_here(host: str, origin: str) -> bool:
    """False for a request that a web page made, by its ``Host`` and ``Origin`` ("": none): any page that a user looks
    at could else use, and after DNS rebinding read, what a server on loopback gives to all."""
    try:
        asked, page = urlsplit(f"//{host}").hostname, urlsplit(origin).hostname
    except ValueError:  # such as half an IPv6 address
        return False
    return is_loopback(asked or "") and (not origin or is_loopback(page or ""))


def read_keys(file: str) -> tuple[str, ...]:
    """The keys in a file, one a line, ``#`` begins a comment; none for "". Raises ConfigError."""
    if not file:
        return ()
    try:
        lines = Path(file).expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the keys cannot be read: {error}", where=file) from None
    keys = tuple(line for line in (line.partition("#")[0].strip() for line in lines) if line)
    if not keys:
        raise ConfigError("the file holds no key", where=file, fix="Write one key a line, or name no file")
    return keys


def bearer(scope: Scope) -> str:
    """The key in ``Authorization: Bearer KEY``; "" if there is none."""
    kind, _, key = _header(scope, b"authorization").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError (413) as soon as it is longer than ``limit`` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ApiError(413, f"the request has more than {limit:,} bytes", code="request_too_large")
        parts.append(part)
    return b"".join(parts)


class Front:
    """ASGI middleware around a `starlette.routing.Router`: what the routes raise becomes an answer in the API's words.

    ``not_ready``: why API requests are refused with 503 now (""). ``keys``: one of which a request must bear, unless
    there are none. ``local``: the daemon is for programs of this machine, so requests that a web page made are refused
    (`from_here`). ``route`` names a path for metrics, from few names.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Counting,
        route: Callable[[str], str],
        not_ready: Callable[[], str] = lambda: "",
        keys: Sequence[str] = (),
        local: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app, self._metrics, self._route, self._not_ready = app, metrics, route, not_ready
        self._keys = [key.encode() for key in keys]
        self._local, self._clock = local, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"no {scope['type']} is spoken here")
        given = _header(scope, b"x-request-id")
        request_id = given if _ID.fullmatch(given) else new_id()
        scope.setdefault("state", {})["request_id"] = request_id
        scope["app"] = self._app  # a bare router then raises what it would else answer as plain text
        started, status, begun = self._clock(), 0, False

        async def answer(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        with logs.fields(request_id=request_id):
            try:
                self._admit(scope)
                await self._app(scope, receive, answer)
            except ClientDisconnect:
                status = status or 499
            except Exception as error:
                refusal = self._refusal(error)
                if begun:
                    # Half an answer is out: only closing the connection can say that it is not whole.
                    raise
                await refuse(refusal, answer)
            finally:
                path = scope["path"]
                self._metrics.add("ctxreuse_http_requests_total", 1, self._route(path), _CLASSES[status // 100 - 1])
                level = logging.DEBUG if path in _OPEN else logging.INFO
                seconds = round(self._clock() - started, 4)
                log.log(level, "%s %s", scope["method"], path, extra={"status": status, "seconds": seconds})

    def _admit(self, scope: Scope) -> None:
        if self._local and not from_here(_header(scope, b"host"), _header(scope, b"origin")):
            raise ApiError(403, "only programs of this machine are served", type="permission_error")
        if scope["path"] in _OPEN:
            return
        if self._keys and not _held(bearer(scope).encode(), self._keys):
            raise ApiError(401, "a valid key is needed: Authorization: Bearer KEY", type="authentication_error")
        why = self._not_ready()
        if why:
            raise ApiError(503, f"the daemon is {why}", type="server_error", code=why, retry_after=1)

    def _refusal(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, HTTPException):
            return ApiError(error.status_code, error.detail, code="no_such_route")
        if isinstance(error, CtxReuseError):
            refusal = api_error(error)
            if refusal.status >= 500:
                log.warning("request failed: %s", error)
            return refusal
        log.exception("request failed")
        return ApiError(500, "the daemon met an error of its own; its log says more", type="server_error")


async def refuse(refusal: ApiError, send: Send) -> None:
    """Send a refusal as an HTTP answer."""
    body = refusal.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.retry_after is not None:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _held(key: bytes, keys: Sequence[bytes]) -> bool:
    # All are compared, each in constant time, so that time tells nothing about any.
    return sum(hmac.compare_digest(key, known) for known in keys) > 0


def _header(scope: Scope, name: bytes) -> str:
    found: Any = next((value for key, value in scope["headers"] if key == name), b"")
    return bytes(found).decode("latin-1")
