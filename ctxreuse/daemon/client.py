"""Talking to a running daemon from the same machine: JSON requests and streamed events, with the standard library."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from ctxreuse.errors import (
    ConfigError,
    ContextTooLongError,
    CtxReuseError,
    EngineError,
    LinkDownError,
    SessionError,
    TokenRangeError,
)

__all__ = ["Client", "Events"]

_MAX_LINE = 1 << 22
_KINDS: dict[str, type[CtxReuseError]] = {
    "context_length_exceeded": ContextTooLongError,
    "token_out_of_range": TokenRangeError,
    "no_such_context": SessionError,
}


class Events:
    """The events of one streamed answer, as dicts; closing it before the end cancels the answer. Not thread-safe."""

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, url: str) -> None:
        self._connection, self._answer, self.url = connection, answer, url

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next event. Raises LinkDownError if the connection ends before the last one."""
        try:
            while True:
                line = self._answer.readline(_MAX_LINE)
                if not line:
                    raise LinkDownError("the daemon broke off in the middle of an answer", where=self.url)
                if line.strip() == b"data: [DONE]":
                    self.close()
                    raise StopIteration
                if line.startswith(b"data: "):
                    event = msgspec.json.decode(line[6:])
                    if isinstance(event, dict):
                        if "error" in event:
                            raise _error(500, line[6:], self.url)
                        return event
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            self.close()
            raise LinkDownError(f"the answer broke off: {error}", where=self.url) from None
        except CtxReuseError:
            self.close()
            raise

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._answer.close()
        self._connection.close()


class Client:
    """One daemon at ``url``. Any thread may call: each request has a connection of its own.

    A key may stand in the URL: ``http://KEY@127.0.0.1:7351``. ``timeout``: seconds without a sign of life. Errors of
    the daemon are raised as what they are there; LinkDownError if it cannot be reached.
    """

    def __init__(self, url: str, *, key: str = "", timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{url!r} is not the address of a daemon", fix="Write http://127.0.0.1:7351")
        try:
            self._host, self._port = parts.hostname, parts.port or 80
        except ValueError:
            raise ConfigError(f"{url!r} has no valid port", fix="Write http://127.0.0.1:7351") from None
        self._key = key or unquote(parts.username or "")
        self._timeout = timeout
        self.url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send ``body`` as JSON and return the answer's JSON."""
        connection, answer = self._send(method, path, body)
        with contextlib.closing(connection):
            try:
                raw = answer.read()
                return msgspec.json.decode(raw) if raw else None
            except (OSError, http.client.HTTPException) as error:
                raise LinkDownError(f"the answer broke off: {error}", where=self.url) from None
            except msgspec.DecodeError:
                raise LinkDownError("what answers there is no daemon of ctxreuse", where=self.url) from None

    def stream(self, path: str, body: Any) -> Events:
        """POST ``body`` as JSON and return the events of the answer as they come."""
        connection, answer = self._send("POST", path, body)
        return Events(connection, answer, self.url)

    def _send(self, method: str, path: str, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        headers = {"content-type": "application/json"} if body is not None else {}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
            answer = connection.getresponse()
            if answer.status >= 400:
                raise _error(answer.status, answer.read(_MAX_LINE), self.url)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            fix = "Start it with `ctxreuse-edge serve`, or name its address"
            raise LinkDownError(f"no daemon answers: {error}", where=self.url, fix=fix) from None
        except CtxReuseError:
            connection.close()
            raise
        return connection, answer


def _error(status: int, body: bytes, url: str) -> CtxReuseError:
    message, code = f"the daemon answered {status}", ""
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        error = msgspec.json.decode(body)["error"]
        message, code = str(error["message"]), str(error["code"])
    if status == 401:
        return ConfigError(message, where=url, fix="Give the key in the address: http://KEY@127.0.0.1:7351")
    if status in (502, 503):
        return LinkDownError(message, where=url)
    return _KINDS.get(code, EngineError)(message, where=url)
