"""Reading the body of a request over ASGI: bounded in size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

__all__ = ["GoneError", "Receive", "TooLargeError", "cancel_when_gone", "read_body"]

Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]


class GoneError(Exception):
    """The caller went away."""


class TooLargeError(Exception):
    """The body is larger than allowed; what follows of it was not read."""


async def read_body(receive: Receive, length: bytes, *, limit: int, timeout: float) -> bytes:
    """The body of a request, at most ``limit`` bytes; ``length`` is the ``Content-Length`` as it was sent.

    Raises TooLargeError, GoneError, and TimeoutError after ``timeout`` seconds.
    """
    if length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise TooLargeError
    pieces: list[bytes] = []
    size, more = 0, True
    async with asyncio.timeout(timeout):
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise GoneError
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise TooLargeError
            pieces.append(piece)
            more = message.get("more_body", False)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def cancel_when_gone(receive: Receive, task: asyncio.Task[Any], over: Callable[[], bool]) -> bool:
    """Wait until the caller disconnects, then cancel ``task``, unless its answer is ``over``; True if it was cancelled.

    After the body has been read only.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    return not over() and task.cancel()
