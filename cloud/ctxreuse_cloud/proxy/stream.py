"""Pass an answer from a backend to the caller: pieces as they come, in whole events of a stream.

Back-pressure bounds memory: a piece is read when the caller's connection has taken the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import aiohttp
import msgspec

from ctxreuse_cloud.proxy.http import RawHeaders

__all__ = [
    "CallerAnswer",
    "Passed",
    "ReportedUsage",
    "Send",
    "StalledError",
    "error_body",
    "pass_on",
    "read_whole",
    "usage_of",
]

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: A part of an event waits for the rest, so that a broken stream ends between two events. Longer ones pass at once.
_EVENT = 1 << 16
#: Answers that are not streams are passed on whole, up to this size: until then another backend may be tried.
_WHOLE = 1 << 20
_TAIL = 1 << 14


class StalledError(Exception):
    """The caller has read nothing for too long."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    moved: int | None = None
    mended: int | None = None


class ReportedUsage(msgspec.Struct):
    """The usage at the end of an answer. Only our own daemons report tokens ``moved`` (relocated) and ``mended``
    (recomputed after relocation)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    def counts(self) -> dict[str, int]:
        """Return the tokens by kind, zero where they were not reported."""
        details = self.prompt_tokens_details or _Details()
        return {
            "prompt": self.prompt_tokens,
            "cached": details.cached_tokens or 0,
            "completion": self.completion_tokens,
            "relocated": details.moved or 0,
            "recomputed": details.mended or 0,
        }

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        return self.counts()["cached"]

    def valid(self) -> bool:
        """Return True if no count is negative."""
        return min(self.counts().values()) >= 0


class _Event(msgspec.Struct):
    usage: ReportedUsage | None = None


_event = msgspec.json.Decoder(_Event)


class Passed(msgspec.Struct):
    """How an answer ended: its bytes, usage (if reported), the error that broke it off, and its last bytes."""

    nbytes: int
    usage: ReportedUsage | None
    broke: str = ""
    tail: bytes = b""


def error_body(message: str, kind: str, status: int) -> bytes:
    """Return an error in the format of OpenAI's API."""
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


async def pass_on(response: aiohttp.ClientResponse, first: bytes, answer: CallerAnswer, *, events: bool) -> Passed:
    """Pass on ``first`` and the rest of a body, after `CallerAnswer.start`.

    If the backend breaks off, a stream of server-sent ``events`` gets an error as its last event; any other body is
    left incomplete, so that the connection is cut.
    """
    piece, pending, nbytes = first, b"", 0
    before = last = b""
    try:
        while piece:
            data = pending + piece if pending else piece
            cut = _end_of_events(data) if events else len(data)
            whole, pending = (data, b"") if cut == len(data) else (data[:cut], data[cut:])
            if whole:
                await answer.write(whole)
                nbytes += len(whole)
                before, last = last, whole
            piece = await response.content.readany()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        if events:
            body = error_body("the backend broke off during the answer", "upstream_error", 502)
            await answer.end(b"data: " + body + b"\n\n")
        return Passed(nbytes, None, reason)
    await answer.end(pending)
    tail = before[-_TAIL:] + last[-_TAIL:] + pending
    return Passed(nbytes + len(pending), usage_of(tail, events=events), tail=tail)


def _end_of_events(data: bytes) -> int:
    """Return the end of the last complete event."""
    if data.endswith((b"\n\n", b"\r\n\r\n")):
        return len(data)
    lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    cut = max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
    return cut if cut or len(data) < _EVENT else len(data)


def usage_of(tail: bytes, *, events: bool) -> ReportedUsage | None:
    """Return the usage at the end of an answer; None if there is none."""
    if b'"usage"' not in tail:
        return None
    lines = [line[5:] for line in tail.splitlines() if line.startswith(b"data:")] if events else [tail]
    for line in reversed(lines):
        if b'"usage"' in line:
            try:
                usage = _event.decode(line).usage
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            if usage is not None and usage.valid():
                return usage
    return None
