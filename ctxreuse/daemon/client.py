"""A client of a running daemon: JSON requests and streamed events, with the standard library only."""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ctxreuse.daemon.address import parse_address
from ctxreuse.daemon.tls import pinned
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
    """The events of a streamed answer, as dicts; closing it early cancels the answer. Not thread-safe."""

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, url: str) -> None:
        self._connection, self._answer, self.url = connection, answer, url

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next event. Raises LinkDownError if the connection ends early."""
        try:
            while True:
                line = self._answer.readline(_MAX_LINE)
                if not line:
                    raise LinkDownError("the daemon broke off during an answer", where=self.url)
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

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._answer.close()
        self._connection.close()


class Client:
    """A daemon at ``url``, which may contain an API key: ``http://KEY@127.0.0.1:7351``. Thread-safe.

    Errors of the daemon are raised with their own types, LinkDownError if it is unreachable or silent for ``timeout``
    seconds. For ``https://`` the authorities of the system are trusted, or those in the file ``SSL_CERT_FILE`` (of the
    environment).
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        timeout: float = 600.0,
        program: str = "ctxreuse-edge",
        certificate: str = "",
    ) -> None:
        """``program``: the daemon's command, for the advice if it does not answer; ``certificate``: file of its own
        certificate, the only one that is accepted then."""
        self._certificate = certificate
        self._address, self._program = parse_address(url), program
        self._key = self._address.key or key
        self._timeout = timeout
        self.url = self._address.url

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
                raise LinkDownError("the server there is not a daemon of ctxreuse", where=self.url) from None

    def stream(self, path: str, body: Any) -> Events:
        """POST ``body`` as JSON and return the events of the answer as they come."""
        connection, answer = self._send("POST", path, body)
        return Events(connection, answer, self.url)

    def events(self, path: str) -> Events:
        """GET a stream of events that never ends by itself; use it as a context manager."""
        connection, answer = self._send("GET", path, None)
        return Events(connection, answer, self.url)

    def _send(self, method: str, path: str, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connection()
        headers = {"content-type": "application/json"} if body is not None else {}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
            answer = connection.getresponse()
            if answer.status >= 400:
                raise _error(answer.status, answer.read(_MAX_LINE), self.url)
        except ssl.SSLCertVerificationError as error:
            connection.close()
            fix = "Name the file of its authority in SSL_CERT_FILE, and the host as the certificate does"
            raise LinkDownError(f"not to be trusted: {error.verify_message}", where=self.url, fix=fix) from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            fix = f"Start it with `{self._program} serve`, or correct its address"
            raise LinkDownError(f"no daemon answers: {error}", where=self.url, fix=fix) from None
        except CtxReuseError:
            connection.close()
            raise
        return connection, answer

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._address.host, self._address.port
        if self._address.scheme != "https":
            return http.client.HTTPConnection(host, port, timeout=self._timeout)
        context = pinned(Path(self._certificate)) if self._certificate else None
        return http.client.HTTPSConnection(host, port, timeout=self._timeout, context=context)


def _error(status: int, body: bytes, url: str) -> CtxReuseError:
    message, code = f"the daemon answered {status}", ""
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        error = msgspec.json.decode(body)["error"]
        message, code = str(error["message"]), str(error["code"])
    if status == 401:
        return ConfigError(message, where=url, fix="Write the API key into the address: http://KEY@127.0.0.1:7351")
    if status in (429, 502, 503):
        return LinkDownError(message, where=url)
    return _KINDS.get(code, EngineError)(message, where=url)
