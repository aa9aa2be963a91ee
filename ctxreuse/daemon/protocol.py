"""HTTP connections of a daemon: uvicorn's on httptools, with bounds in bytes and seconds for a request's head.

The parser reads all that has come, so what is sent behind a request waits as requests: a few, and none after something
that is no HTTP, which is answered with 400 after those before it. Trailers are left out; no other protocol is
spoken.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ctxreuse.bus.log_limit import LimitedLog
from ctxreuse.daemon.openai import ApiError

__all__ = ["protocol"]

#: Bytes that may come in which the parser finds no end of a head, nor of a trailer.
_MOST = 1 << 16
#: Requests that a connection may send behind the one that is being answered.
_AHEAD = 16
_INVALID = "Invalid HTTP request received."


def protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return the class of a server's connections; headers must be complete ``seconds`` after their first byte, or after
    the connection was made."""
    logger = _Logger(logging.getLogger("uvicorn.error"))
    return type("Connection", (_Connection,), {"seconds": seconds, "limited": logger})


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """uvicorn's logger; warnings, which anyone who reaches the port can cause, share one budget."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger)
        self._limited = LimitedLog(logger)

    @property
    def level(self) -> int:
        """See `logging.Logger.level`; uvicorn asks for it at each connection."""
        return self.logger.level

    def warning(self, msg: object, *args: object, **options: Any) -> None:
        """See `logging.Logger.warning`."""
        self._limited.write("", logging.WARNING, str(msg), *args, **options)


class _Connection(HttpToolsProtocol):
    seconds: ClassVar[float]
    limited: ClassVar[_Logger]
    _deadline: asyncio.TimerHandle | None = None
    #: The request that is being answered; `cycle` is the last one that came.
    _running: RequestResponseCycle | None = None
    _joined: _Joined
    #: A head has begun and not ended; bytes since the parser found anything.
    _begun, _unread = False, 0
    #: What came is no HTTP.
    _refused = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.logger = self.limited  # type: ignore[assignment]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._refused:
            return
        before = self.cycle
        self._unread += len(data)
        try:
            while data:
                data = self._feed(data)
            if self._unread > _MOST:
                raise httptools.HttpParserError("too long")
        except httptools.HttpParserError:
            self._refuse()
        if self.cycle is not before:
            self._stop()
        elif self._idle():
            self._wait()

    def _feed(self, data: bytes) -> bytes:
        """Parse; returns what is to be parsed after that. Raises HttpParserError."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser has taken the body for the other protocol: once more, without the wish.
            version = self.parser.get_http_version().encode()
            lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
            lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
            return b"\r\n".join([*lines, b"", data[upgrade.args[0] :]])
        return b""

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _AHEAD:
            raise ValueError("too many requests at once")
        super().on_message_begin()
        self._begun, self._unread = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("no tunnel begins here")
            return
        hosts, version = sum(name == b"host" for name, _ in self.headers), self.parser.get_http_version()
        if hosts > 1 or version not in ("1.0", "1.1") or (version == "1.1" and not hosts):
            raise ValueError("another version, or not one name of a host")
        self._begun, self._unread = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._unread = 0
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = self._joined = _Joined(cycle, self.loop)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, _unframed(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def on_response_complete(self) -> None:
        self._joined.flush()
        super().on_response_complete()
        if self.transport.is_closing() or not self._idle():
            return
        if self._refused:
            self.send_400_response(_INVALID)
        elif self._begun:
            self._wait()  # the beginning of another request came with the last one

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self) -> None:
        """Answer that it is no HTTP: at once, or after what was whole before it."""
        self._refused = True
        self.logger.warning(_INVALID)
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running  # type: ignore[assignment]
        if self._idle() or (self.cycle.more_body and not self.cycle.response_started):
            self.send_400_response(_INVALID)
        elif self.cycle.more_body:
            self.transport.close()

    def _wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.seconds, self._late)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or not self._idle():
            return
        if not self._begun:
            self.transport.close()  # no request yet, or an answer before the end of the body
            return
        body = ApiError(408, f"the headers did not arrive within {self.seconds:g} s", code="request_timeout").body()
        head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class _Joined:
    """The transport of one answer: writes its head with what comes at once behind it, in one system call."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle, self._transport, self._loop = cycle, cycle.transport, loop
        self._head: bytes | None = None
        self.is_closing = self._transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head is None and self._cycle.response_started:
            self._head = data
            self._loop.call_soon(self.flush)
        elif self._head:
            data, self._head = self._head + data, b""
            self._transport.write(data)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        if self._head and not self.is_closing():
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()


def _unframed(app: Any, cycle: RequestResponseCycle) -> Any:
    """Return ``app`` for HTTP/1.0, which knows no chunks: an answer of unknown length ends with its connection."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        framed = True

        async def plain(message: Any) -> None:
            nonlocal framed
            if message["type"] == "http.response.start":
                framed = any(name.lower() == b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = None if framed else False
            elif not framed:
                cycle.expected_content_length = len(message.get("body", b"")) + message.get("more_body", False)
            await send(message)

        await app(scope, receive, plain)

    return served
