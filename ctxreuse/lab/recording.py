"""Reads recordings of one's own traffic: hashes and counts, no text and no token ids.

One JSON object a line. The first identifies the file; each other is a request, or how one ended::

    {"format": "ctxreuse-trace", "version": 1, "block_tokens": 64, "token_bytes": 23040, "unit": "tokens"}
    {"t": 12.5, "n": 1300, "at": "", "new": "5f0c…"}      20 hashes of 16 digits, root first
    {"end": 0, "stop": 1, "out": 120, "busy": 3.1}        how the request with number 0 ended; may come in parts
    {"t": 19.0, "n": 1900, "at": "77ab…", "new": "01d9…"} goes on after the block that "at" names

A hash is of 63 bits, of a whole prefix and keyed with a secret that is written nowhere: it can neither be compared with
other recordings nor be guessed from a text. ``unit`` is ``bytes`` where the tokens were unknown: a block is then
4·block_tokens bytes of the request, and counts are estimates. A file is untrusted: all is checked and bounded.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from ctxreuse.errors import FormatError
from ctxreuse.lab.lines import UNREADABLE, first_line, read_lines
from ctxreuse.lab.trace import Request, Trace
from ctxreuse.pauses.kinds import LABELS

__all__ = ["DIGITS", "FORMAT", "VERSION", "Ended", "Head", "Prompted", "recording", "recording_head"]

FORMAT = "ctxreuse-trace"
VERSION = 1
#: Hexadecimal digits of a hash.
DIGITS = 16

#: How many later requests may come before a request's end is read; what ends later keeps its end to itself.
_OPEN = 1024
#: Blocks of one prompt, and different blocks of a file, about 40 bytes of memory each.
_MOST_PATH = 1 << 20
_MOST_BLOCKS = 1 << 26


class Head(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line. ``token_bytes``: KV of one token, 0 where it is not known."""

    format: str
    version: int
    block_tokens: int
    token_bytes: int = 0
    unit: Literal["tokens", "bytes"] = "tokens"


class Prompted(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request came: at ``t`` seconds, ``n`` tokens, the hashes ``new`` after the block ``at``."""

    t: float
    n: int
    at: str = ""
    new: str = ""


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """Request number ``end`` was answered after ``busy`` seconds with ``out`` tokens and stopped for ``stop``, a label
    of `ctxreuse.pauses`. A second line on a request adds what it says."""

    end: int
    stop: int = 0
    out: int = 0
    busy: float = 0.0


class _Line(msgspec.Struct):
    t: float | None = None
    n: int = 0
    at: str = ""
    new: str = ""
    end: int | None = None
    stop: int = 0
    out: int = 0
    busy: float = 0.0


def recording_head(path: Path) -> Head:
    """Return the first line, checked. Raises FormatError for anything else, and for a version of the future."""
    return _head(first_line(path), path)


def recording(path: Path) -> Trace:
    """Return the trace in a recording. Sessions are inferred from prompts that continue where another one ended."""
    head = recording_head(path)
    return Trace(path.name, head.block_tokens, lambda: _Reading(path, head).requests(), format="recording")


def _head(line: bytes, path: Path) -> Head:
    try:
        head = msgspec.json.decode(line, type=Head)
    except UNREADABLE as error:
        raise FormatError(f"no recording: {error}", where=path.name, fix="Check the file") from None
    if head.format != FORMAT:
        raise FormatError(f"no recording but {head.format[:40]!r}", where=path.name)
    if head.version != VERSION:
        raise FormatError(
            f"a recording of version {head.version}, and this program reads {VERSION}",
            where=path.name,
            fix="Use a newer ctxreuse" if head.version > VERSION else "Record again",
        )
    if not 1 <= head.block_tokens <= 4096 or not 0 <= head.token_bytes <= 1 << 30:
        raise FormatError("blocks or tokens of an impossible size", where=path.name)
    return head


class _Reading:
    """One pass over a file. Blocks are numbered as they come; of each its parent is known."""

    def __init__(self, path: Path, head: Head) -> None:
        self._path, self._head = path, head
        self._numbers: dict[int, int] = {}
        self._parent, self._depth, self._ids = array("i"), array("i"), array("q")
        self._tips: dict[int, int] = {}
        self._stops: dict[int, tuple[float, int]] = {}
        self._before, self._count, self._sessions = 0.0, 0, 0

    def requests(self) -> Iterator[Request]:
        decode = msgspec.json.Decoder(_Line).decode
        lines = read_lines(self._path)
        _head(next(lines)[1], self._path)
        waiting: deque[Request] = deque()
        done = 0
        for number, raw in lines:
            try:
                line = decode(raw)
                if line.t is not None:
                    waiting.append(self._prompted(line.t, line))
                    self._count += 1
                elif line.end is not None:
                    self._ended(line.end, line, waiting, done)
                else:
                    raise ValueError("neither a request nor an end")
            except (*UNREADABLE, ValueError) as error:
                where = f"{self._path.name}, line {number}"
                raise FormatError(
                    f"the recording is damaged: {error}", where=where, fix="Record again, or cut the file there"
                ) from None
            if len(waiting) > _OPEN:
                done += 1
                yield self._out(waiting.popleft())
        while waiting:
            yield self._out(waiting.popleft())

    def _prompted(self, t: float, line: _Line) -> Request:
        if not math.isfinite(t) or t < self._before:
            raise ValueError(f"time goes back to {t:g} s")
        size, numbers = self._head.block_tokens, self._numbers
        tip = -1
        if line.at:
            tip = numbers.get(_hash(line.at), -1)
            if tip < 0:
                raise ValueError("a request goes on after a block that was not recorded")
        if len(line.new) % DIGITS:
            raise ValueError("a cut-off hash")
        fresh = len(line.new) // DIGITS
        depth = (self._depth[tip] if tip >= 0 else 0) + fresh
        if depth > _MOST_PATH or not 0 <= line.n <= _MOST_PATH * 4096 or depth > -(-line.n // size):
            raise ValueError(f"{depth:,} blocks for {line.n:,} tokens")
        session = self._session(tip)
        for start in range(0, len(line.new), DIGITS):
            tip = self._add(_hash(line.new[start : start + DIGITS]), tip)
        if tip >= 0:
            self._tips[tip] = session
        self._before = t
        return Request(t, self._walk(tip), line.n, session)

    def _session(self, tip: int) -> int:
        known = self._tips.pop(tip, None)
        if known is not None:
            return known
        self._sessions += 1
        return self._sessions - 1

    def _add(self, name: int, parent: int) -> int:
        number = self._numbers.get(name)
        if number is None:
            if len(self._ids) >= _MOST_BLOCKS:
                raise ValueError(f"more than {_MOST_BLOCKS:,} blocks")
            number = self._numbers[name] = len(self._ids)
            self._ids.append(name)
            self._parent.append(parent)
            self._depth.append(self._depth[parent] + 1 if parent >= 0 else 1)
        elif self._parent[number] != parent:
            raise ValueError("a hash names two different prefixes")
        return number

    def _walk(self, tip: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        path = np.empty(self._depth[tip] if tip >= 0 else 0, np.int64)
        ids, parent = self._ids, self._parent
        for place in range(len(path) - 1, -1, -1):
            path[place] = ids[tip]
            tip = parent[tip]
        return path

    def _ended(self, number: int, line: _Line, waiting: deque[Request], done: int) -> None:
        if not (math.isfinite(line.busy) and line.busy >= 0 and line.out >= 0 and 0 <= line.stop < LABELS):
            raise ValueError("an end with an impossible count")
        if not 0 <= number < self._count:
            raise ValueError("the end of a request that has not come")
        if number >= done:
            place = number - done
            known = waiting[place]
            stop, shape = (line.stop & 31, line.stop >> 5) if line.stop else (known.stop, known.shape)
            waiting[place] = known._replace(
                stop=stop, shape=shape, output=line.out or known.output, busy=line.busy or known.busy
            )

    def _out(self, request: Request) -> Request:
        """With what is known of the session's turn before."""
        ended, label = self._stops.get(request.session, (request.t, 0))
        self._stops[request.session] = (request.t + request.busy, request.stop)
        return request._replace(label=label, pause=max(0.0, request.t - ended))


def _hash(digits: str) -> int:
    if len(digits) != DIGITS:
        raise ValueError("a hash of another length")
    value = int(digits, 16)
    if not 0 <= value < 1 << 63 or not digits.isalnum():
        raise ValueError("no hash")
    return value
