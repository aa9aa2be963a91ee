"""HTTP connections of a daemon: uvicorn's, with a deadline for the headers of a request."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ctxreuse.bus.log_limit import LimitedLog
from ctxreuse.daemon.openai import ApiError

__all__ = ["protocol"]


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


class _Joined:
    """A transport that joins the writes of one turn of the loop: uvicorn writes the head and the body of an answer by
    themselves, and each wakes the caller."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._parts = transport, loop, list[bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """See `asyncio.WriteTransport.write`; it is written when the running callback has ended."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """See `asyncio.BaseTransport.close`."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts:
            data, self._parts = b"".join(self._parts), []
            if not self._transport.is_closing():  # the client may be away since; uvloop raises then, asyncio does not
                self._transport.write(data)


class _Connection(H11Protocol):
    seconds: ClassVar[float]
    limited: ClassVar[_Logger]
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.logger = self.limited  # type: ignore[assignment]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Joined(transport, self.loop))  # type: ignore[arg-type]
        self._wait()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop()
        elif self.cycle is None or self.cycle.response_complete:
            self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._wait()  # the beginning of another request came with the last one

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.seconds, self._late)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or not (self.cycle is None or self.cycle.response_complete):
            return
        if self.conn.their_state is not h11.IDLE or not self.conn.trailing_data[0]:
            self.transport.close()  # no request yet, or an answer before the end of the body
            return
        body = ApiError(408, f"the headers did not arrive within {self.seconds:g} s", code="request_timeout").body()
        head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
