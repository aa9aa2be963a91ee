"""Requests and answers over ASGI: headers that the proxy passes on, and bodies, bounded in size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

from ctxreuse.daemon.middleware import KV_HINTS

__all__ = [
    "REQUEST_ID",
    "DisconnectedError",
    "RawHeaders",
    "Receive",
    "TooLargeError",
    "answer_headers",
    "cancel_on_disconnect",
    "read_body",
    "request_headers",
]

Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
RawHeaders = list[tuple[bytes, bytes]]

REQUEST_ID = b"x-request-id"

# RFC 9110, 7.6.1, and the older names that are still sent.
_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer".split()
) | {b"transfer-encoding", b"upgrade"}
# The caller's key is for this node; bodies may be rewritten; compressed answers cannot be passed on in pieces.
_MINE = frozenset(b"host content-length expect authorization cookie accept-encoding api-key x-api-key".split())
_THEIRS = frozenset(b"server date set-cookie".split()) | {REQUEST_ID, KV_HINTS.encode()}


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """Return the headers that ``Connection`` declares hop-by-hop."""
    return {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}


def request_headers(raw: Iterable[tuple[bytes, bytes]], identity: str, key: str) -> list[tuple[str, str]]:
    """Return the headers for the backend: the caller's, with the request id and the backend's API ``key``.

    Names in ``raw`` are lower case, as in ASGI. ``traceparent`` and ``tracestate`` pass like any other.
    """
    raw = list(raw)
    drop = _HOP | _MINE | _named_by_connection(raw) | {REQUEST_ID}
    out = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw if name not in drop]
    out += [("accept-encoding", "identity"), ("x-request-id", identity)]
    if key:
        out.append(("authorization", f"Bearer {key}"))
    return out


def answer_headers(raw: Iterable[tuple[bytes, bytes]], identity: str) -> RawHeaders:
    """Return the headers for the caller: the backend's, with the request id."""
    lower = [(name.lower(), value) for name, value in raw]
    drop = _HOP | _THEIRS | _named_by_connection(lower)
    return [(name, value) for name, value in lower if name not in drop] + [(REQUEST_ID, identity.encode())]


class DisconnectedError(Exception):
    """The caller disconnected."""


class TooLargeError(Exception):
    """The body is larger than allowed; the rest was not read."""


async def read_body(
    receive: Receive, length: bytes, take: Callable[[int], None], *, limit: int, timeout: float
) -> bytes:
    """Return the body of a request, at most ``limit`` bytes; ``length``: its ``Content-Length`` header.

    ``take`` is called with the bytes of each piece. Raises TooLargeError, DisconnectedError, TimeoutError after
    ``timeout`` seconds, and errors of ``take``.
    """
    if length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise TooLargeError
    pieces: list[bytes] = []
    size, more = 0, True
    async with asyncio.timeout(timeout):
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise DisconnectedError
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise TooLargeError
            take(len(piece))
            pieces.append(piece)
            more = message.get("more_body", False)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def cancel_on_disconnect(receive: Receive, task: asyncio.Task[Any], over: Callable[[], bool]) -> bool:
    """Wait until the caller disconnects, then cancel ``task`` unless its answer is ``over``; True if it was cancelled.

    Only after the body has been read.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    return not over() and task.cancel()
