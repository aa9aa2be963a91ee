"""An answer on its way from a backend to the caller: pieces pass as they come, whole events of a stream at a time.

Memory is bounded by back-pressure: a piece is read when the one before has been taken by the caller's connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import aiohttp
import msgspec

from ctxreuse_cloud.proxy.headers import RawHeaders

__all__ = ["Answer", "Counted", "Passed", "Send", "StalledError", "error_body", "pass_on", "read_whole", "usage_of"]

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: A part of an event is held back until the rest has come, so that a stream that breaks ends between two events. Longer
#: ones pass as they are.
_EVENT = 1 << 16
#: Answers that are no streams are passed on when they are whole, up to this size: until then another backend may help.
_WHOLE = 1 << 20
_TAIL = 1 << 14


class StalledError(Exception):
    """The caller has taken nothing for too long."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    moved: int | None = None
    mended: int | None = None


class Counted(msgspec.Struct):
    """The usage that an answer ends with: tokens, of which ``cached`` cost the backend no computing. ``moved`` ones of
    these had stood elsewhere, ``mended`` ones were moved and computed again: only our own daemons say so."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0

    @property
    def moved(self) -> int:
        """Cached tokens that were reused at another position."""
        return (self.prompt_tokens_details.moved or 0) if self.prompt_tokens_details else 0

    @property
    def mended(self) -> int:
        """Moved tokens that were computed again."""
        return (self.prompt_tokens_details.mended or 0) if self.prompt_tokens_details else 0

    def sound(self) -> bool:
        """True if these can be counts."""
        return min(self.prompt_tokens, self.completion_tokens, self.cached, self.moved, self.mended) >= 0


class _Event(msgspec.Struct):
    usage: Counted | None = None


_event = msgspec.json.Decoder(_Event)


class Passed(msgspec.Struct):
    """What became of an answer that was begun: its bytes, its ``usage`` if it said so, and why it ``broke`` off.

    ``tail``: its end, by which to see why it stopped.
    """

    nbytes: int
    usage: Counted | None
    broke: str = ""
    tail: bytes = b""


def error_body(message: str, kind: str, status: int) -> bytes:
    """An error as OpenAI's API spells it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


class Answer:
    """The caller's side of one answer over ASGI, in an ``async with`` block. ``silence``: seconds after which a caller
    who takes nothing is left: what runs in the block is cancelled, and it raises StalledError.

    ``begun`` tells whether anything was sent; ``over`` is set before the last message, after which a server reports a
    disconnect that means nothing any more.
    """

    def __init__(self, send: Send, silence: float) -> None:
        self._send, self._silence = send, silence
        self.begun = self.over = False
        # One timer an answer, that looks since when a piece waits: one a piece would cost as much as passing it on.
        self._waits: float | None = None
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Answer:
        await self._limit.__aenter__()
        self._clock = asyncio.get_running_loop().time
        self._look()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        assert self._timer is not None
        self._timer.cancel()
        try:
            await self._limit.__aexit__(*raised)
        except TimeoutError:
            raise StalledError(f"the caller took nothing for {self._silence:.0f} s") from None

    def _look(self) -> None:
        now = self._clock()
        left = self._silence if self._waits is None else self._waits + self._silence - now
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)
        else:
            self._limit.reschedule(now)

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Status and headers."""
        self.begun = True
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """A piece of the body; returns when the connection takes more."""
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """The last piece."""
        self.over = True
        await self._put({"type": "http.response.body", "body": data, "more_body": False})

    async def whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """All at once."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [pair for pair in headers if pair[0] != b"content-length"] + [length])
        await self.end(body)

    async def _put(self, message: MutableMapping[str, Any]) -> None:
        self._waits = self._clock()
        await self._send(message)
        self._waits = None


async def read_whole(response: aiohttp.ClientResponse, limit: int = _WHOLE) -> tuple[bytes, bool]:
    """The body, or its first ``limit`` bytes and a little more; the flag says whether that is all."""
    pieces, size = [], 0
    while piece := await response.content.readany():
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            return b"".join(pieces), False
    return b"".join(pieces), True


async def pass_on(response: aiohttp.ClientResponse, first: bytes, answer: Answer, *, events: bool) -> Passed:
    """Pass the rest of a body on after ``first``, which has been read; the answer has been started.

    ``events``: it is a stream of server-sent events. Breaking off in the middle is no exception here: a stream gets an
    error as its last event, anything else is left without its end, so that the connection is cut and the caller knows.
    """
    piece, held, nbytes = first, b"", 0
    before = last = b""
    try:
        while piece:
            data = held + piece if held else piece
            cut = _end_of_events(data) if events else len(data)
            whole, held = (data, b"") if cut == len(data) else (data[:cut], data[cut:])
            if whole:
                await answer.write(whole)
                nbytes += len(whole)
                before, last = last, whole
            piece = await response.content.readany()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        said = str(error) or type(error).__name__
        if events:
            body = error_body("the backend broke off in the middle of the answer", "upstream_error", 502)
            await answer.end(b"data: " + body + b"\n\n")
        return Passed(nbytes, None, said)
    await answer.end(held)
    tail = before[-_TAIL:] + last[-_TAIL:] + held
    return Passed(nbytes + len(held), usage_of(tail, events=events), tail=tail)


def _end_of_events(data: bytes) -> int:
    """Where the last whole event ends."""
    if data.endswith((b"\n\n", b"\r\n\r\n")):
        return len(data)
    lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    cut = max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
    return cut if cut or len(data) < _EVENT else len(data)


def usage_of(tail: bytes, *, events: bool) -> Counted | None:
    """The usage at the end of an answer, None if it says none that can be read."""
    if b'"usage"' not in tail:
        return None
    lines = [line[5:] for line in tail.splitlines() if line.startswith(b"data:")] if events else [tail]
    for line in reversed(lines):
        if b'"usage"' in line:
            try:
                usage = _event.decode(line).usage
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            if usage is not None and usage.sound():
                return usage
    return None
