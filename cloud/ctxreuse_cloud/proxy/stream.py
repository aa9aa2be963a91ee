"""Pass an answer from a backend to the caller: pieces as they come, in whole events of a stream.

Back-pressure bounds memory: a piece is read when the caller's connection has taken the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import aiohttp
import msgspec

from ctxreuse.daemon.anthropic import answers as anthropic
from ctxreuse.daemon.openai import ApiError
from ctxreuse_cloud.proxy.http import RawHeaders
from ctxreuse_cloud.proxy.reported import ReportedUsage, usage_of

__all__ = [
    "EVENTS",
    "LINES",
    "CallerAnswer",
    "Passed",
    "Send",
    "StalledError",
    "error_body",
    "pass_on",
    "read_whole",
]

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: A part of an event waits for the rest, so that a broken stream ends between two events. Longer ones pass at once.
_EVENT = 1 << 16
#: Answers that are not streams are passed on whole, up to this size: until then another backend may be tried.
_WHOLE = 1 << 20
_TAIL = 1 << 14

#: What ends an event of server-sent events, and a line of JSON lines.
EVENTS, LINES = b"\n\n", b"\n"


class StalledError(Exception):
    """The caller has read nothing for too long."""


class Passed(msgspec.Struct):
    """How an answer ended: its bytes, usage (if reported), the error that broke it off, and its last bytes."""

    nbytes: int
    usage: ReportedUsage | None
    broke: str = ""
    tail: bytes = b""


def error_body(message: str, kind: str, status: int, path: str = "", request: str = "") -> bytes:
    """Return an error in the format of the API that a path belongs to; ``request``: its id."""
    if path.startswith("/v1/messages"):
        return anthropic.error_body(ApiError(status, message, type=kind), request)
    if path.startswith("/api/"):
        return msgspec.json.encode({"error": message})
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


class CallerAnswer:
    """The caller's side of one answer over ASGI, in an ``async with`` block.

    If the caller reads nothing for ``silence`` seconds, the block is cancelled and raises StalledError. ``begun``:
    something was sent; ``over``: set before the last message, after which a disconnect means nothing.
    """

    def __init__(self, send: Send, silence: float) -> None:
        self._send, self._silence = send, silence
        self.begun = self.over = False
        #: Added to the headers of the answer; its content type.
        self.extra: RawHeaders = []
        self.media = ""
        #: Bytes of the body so far.
        self.nbytes = 0
        # One timer for the answer: one per piece would cost as much as passing it on.
        self._waits: float | None = None
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> CallerAnswer:
        await self._limit.__aenter__()
        self._clock = asyncio.get_running_loop().time
        self._check_silence()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        assert self._timer is not None
        self._timer.cancel()
        try:
            await self._limit.__aexit__(*raised)
        except TimeoutError:
            raise StalledError(f"the caller read nothing for {self._silence:.0f} s") from None

    def _check_silence(self) -> None:
        now = self._clock()
        left = self._silence if self._waits is None else self._waits + self._silence - now
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._check_silence)
        else:
            self._limit.reschedule(now)

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send status and headers."""
        self.begun = True
        self.media = next((value.decode("latin-1") for name, value in headers if name == b"content-type"), "")
        if self.extra:
            headers = [pair for pair in headers if not pair[0].startswith(b"x-ratelimit-")] + self.extra
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; returns when the connection takes more."""
        self.nbytes += len(data)
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece."""
        self.over = True
        self.nbytes += len(data)
        await self._put({"type": "http.response.body", "body": data, "more_body": False})

    async def whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send a whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [pair for pair in headers if pair[0] != b"content-length"] + [length])
        await self.end(body)

    async def _put(self, message: MutableMapping[str, Any]) -> None:
        self._waits = self._clock()
        await self._send(message)
        self._waits = None


async def read_whole(response: aiohttp.ClientResponse, limit: int = _WHOLE) -> tuple[bytes, bool]:
    """Return the body, or little more than its first ``limit`` bytes, and whether it is complete."""
    pieces, size = [], 0
    while piece := await response.content.readany():
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            return b"".join(pieces), False
    return b"".join(pieces), True


async def pass_on(
    response: aiohttp.ClientResponse, first: bytes, answer: CallerAnswer, *, framing: bytes = b"", last: bytes = b""
) -> Passed:
    """Pass on ``first`` and the rest of a body, after `CallerAnswer.start`.

    ``framing``: what ends an event of a stream, or a line; such a stream gets ``last`` as its last event if the backend
    breaks off. Any other body is left incomplete, so that the connection is cut.
    """
    piece, pending, nbytes = first, b"", 0
    before = end = b""
    try:
        while piece:
            data = pending + piece if pending else piece
            cut = _end_of_events(data, framing) if framing else len(data)
            whole, pending = (data, b"") if cut == len(data) else (data[:cut], data[cut:])
            if whole:
                await answer.write(whole)
                nbytes += len(whole)
                before, end = end, whole
            piece = await response.content.readany()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        if framing:
            await answer.end(last)
        return Passed(nbytes, None, reason)
    await answer.end(pending)
    tail = before[-_TAIL:] + end[-_TAIL:] + pending
    usage = usage_of(tail, events=bool(framing))
    began = usage_of(first.partition(framing)[0], events=True) if framing else None
    if usage is not None and not usage.prompt_tokens and began is not None:
        usage = ReportedUsage(began.prompt_tokens, usage.completion_tokens, began.prompt_tokens_details)
    return Passed(nbytes + len(pending), usage, tail=tail)


def _end_of_events(data: bytes, framing: bytes) -> int:
    """Return the end of the last complete event."""
    if data.endswith(framing):
        return len(data)
    cut = data.rfind(framing) + len(framing) if framing in data else 0
    if framing == EVENTS:
        crlf = data.rfind(b"\r\n\r\n")
        cut = max(cut, crlf + 4 if crlf >= 0 else 0)
    return cut if cut or len(data) < _EVENT else len(data)
