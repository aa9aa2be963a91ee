"""Reads coding-agent sessions with pauses and lets them run side by side on one clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.errors import FormatError
from ctxreuse.lab.lines import UNREADABLE, read_lines
from ctxreuse.lab.trace import Path as BlockPath
from ctxreuse.lab.trace import Request, Trace, label_of

__all__ = ["SESSIONS", "SPAN", "WINDOW", "agent_sessions"]

#: The interleaving that our figures are of: 130 sessions, begun within an hour, two hours of each.
SESSIONS = 130
SPAN = 3600.0
WINDOW = 7200.0

_BLOCK_TOKENS = 64
#: Ids of one session stay below this; the session's number goes above it.
_ID_BITS = 32
_MOST_BLOCKS = 1 << 20
_SHAPES = {"text": 1, "thinking": 2, "tool_use": 4}


class _Turn(msgspec.Struct):
    t: float
    type: str = ""
    tokens: int = msgspec.field(name="in", default=0)
    out: int = 0
    stop: str = ""
    api_time: float | None = 0.0
    think_time: float | None = 0.0
    hash_runs: list[tuple[int, int]] = []
    output_types: list[str] = []
    requests: list[_Turn] = []


class _Session(msgspec.Struct):
    block_size: int
    requests: list[_Turn]


def agent_sessions(
    path: Path,
    *,
    sessions: int | None = SESSIONS,
    part: tuple[int, int] | None = None,
    span: float = SPAN,
    window: float | None = WINDOW,
    subagents: bool = False,
    seed: int = 0,
) -> Trace:
    """Return the first ``sessions`` of the file (None: all), interleaved on a common clock, which the file has not.

    Session i starts at the i-th smallest of as many draws from 0 to ``span`` seconds and is cut ``window`` seconds
    after its own start. ``part``: only sessions from the first number up to the second, at the same starts, so that
    (0, 65) and (65, 130) are halves of one run. ``subagents``: each as a session of its own, from 2^20 up. Block ids
    mean something inside one session only. Raises FormatError while it is read, and so for an empty selection.
    """

    def read() -> Iterator[Request]:
        found = _load(path, sessions)
        starts = np.sort(np.random.default_rng(seed).uniform(0, span, len(found)))
        low, high = part or (0, len(found))
        runs: list[Iterator[Request]] = []
        for number in range(low, min(high, len(found))):
            start = float(starts[number])
            runs.append(_play(_cut(found[number].requests, window), number, number, start))
            for n, turn in enumerate(found[number].requests if subagents else ()):
                if turn.type == "subagent" and (window is None or turn.t <= window):
                    own = (1 << 20) + (number << 10) + n
                    rest = None if window is None else window - turn.t
                    runs.append(_play(_cut(turn.requests, rest), own, number, start + turn.t))
        return heapq.merge(*runs, key=lambda request: request.t)

    name = path.name if part is None else f"{path.name} sessions {part[0]}-{part[1] - 1}"
    return Trace(name, _BLOCK_TOKENS, read, format="sessions")


def _load(path: Path, most: int | None) -> list[_Session]:
    """Run-length coded as they are, hundreds of sessions take some ten MB."""
    decode = msgspec.json.Decoder(_Session).decode
    found: list[_Session] = []
    for number, line in read_lines(path):
        where = f"{path.name}, line {number}"
        if most is not None and len(found) == most:
            break
        try:
            session = decode(line)
        except UNREADABLE as error:
            raise FormatError(f"no session: {error}", where=where, fix="Check the file, or name its --format") from None
        if session.block_size != _BLOCK_TOKENS:
            raise FormatError(f"blocks of {session.block_size} tokens", where=where, fix="Blocks must have 64 tokens")
        for turn in session.requests:
            for own in (turn, *turn.requests):
                _check(own, where)
        found.append(session)
    return found


def _check(turn: _Turn, where: str) -> None:
    blocks = 0
    for first, count in turn.hash_runs:
        if first < 0 or count < 1 or first + count > 1 << _ID_BITS:
            raise FormatError(f"a run of {count} blocks from {first}", where=where)
        blocks += count
    if blocks > min(_MOST_BLOCKS, -(-turn.tokens // _BLOCK_TOKENS)):
        raise FormatError(f"{blocks:,} blocks for {turn.tokens:,} tokens", where=where)
    times = (turn.t, turn.api_time or 0.0, turn.think_time or 0.0)
    if not all(math.isfinite(x) and x >= 0 for x in times) or turn.out < 0:
        raise FormatError("a time or a count below zero", where=where)


def _cut(turns: Sequence[_Turn], window: float | None) -> list[_Turn]:
    """Requests in the order of time, up to ``window`` seconds."""
    own = [turn for turn in turns if turn.type != "subagent" and (window is None or turn.t <= window)]
    return sorted(own, key=lambda turn: turn.t)


def _play(turns: Sequence[_Turn], session: int, scope: int, start: float) -> Iterator[Request]:
    label = 0
    for turn in turns:
        stop = label_of(turn.stop)
        yield Request(
            start + turn.t,
            _path(turn.hash_runs, scope),
            turn.tokens,
            session,
            label,
            stop,
            turn.out,
            turn.api_time or 0.0,
            turn.think_time or 0.0,
            sum(bit for kind, bit in _SHAPES.items() if kind in turn.output_types),
        )
        label = stop


def _path(runs: Sequence[tuple[int, int]], scope: int) -> BlockPath:
    base = scope << _ID_BITS
    parts: list[npt.NDArray[np.int64]] = [np.arange(base + a, base + a + n, dtype=np.int64) for a, n in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
