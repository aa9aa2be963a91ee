"""Made-up traffic for those who have no trace: seeded, of documented distributions, as long as one likes.

Sessions come as a Poisson process. Each begins with one of several shared prompts (system prompt and tools), chosen by
a Zipf law, and grows turn by turn: lognormal new tokens, a geometric number of turns, and between two turns a lognormal
pause, which for a share of the turns is that of a tool and else that of a person. Parameters of ``agents`` are fitted
by eye to recordings of coding agents, those of ``chat`` and ``documents`` are plausible. It does not replace one's
own traffic: rankings of policies move with it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec
import numpy as np

from ctxreuse.errors import ConfigError
from ctxreuse.lab.trace import END_OF_TURN, TOOL_CALL, Path, Request, Trace

__all__ = ["KINDS", "Kind", "generate"]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Distributions of one kind of traffic. Lognormal ones as (median, sigma of the logarithm); seconds and tokens."""

    about: str
    sessions_per_second: float
    prompts: int
    zipf: float
    prompt: tuple[float, float]
    turns: float
    grow: tuple[float, float]
    answer: tuple[float, float]
    tools: float
    tool_pause: tuple[float, float]
    pause: tuple[float, float]
    most: int


KINDS: dict[str, Kind] = {
    "agents": Kind(
        about="coding agents: long shared prompts, dozens of turns, mostly waiting for tools",
        sessions_per_second=0.02,
        prompts=24,
        zipf=1.1,
        prompt=(15_000, 0.4),
        turns=38,
        grow=(900, 1.2),
        answer=(220, 1.1),
        tools=0.93,
        tool_pause=(9, 1.5),
        pause=(96, 1.8),
        most=200_000,
    ),
    "chat": Kind(
        about="people talking: short shared prompts, a few turns, minutes between them",
        sessions_per_second=2.0,
        prompts=60,
        zipf=1.2,
        prompt=(700, 0.8),
        turns=3.5,
        grow=(250, 1.3),
        answer=(340, 0.7),
        tools=0.0,
        tool_pause=(1, 1),
        pause=(60, 1.3),
        most=32_000,
    ),
    "documents": Kind(
        about="questions over documents: long texts that some ask about often and most rarely",
        sessions_per_second=1.0,
        prompts=3_000,
        zipf=1.0,
        prompt=(9_000, 0.9),
        turns=1.6,
        grow=(120, 0.8),
        answer=(180, 0.7),
        tools=0.0,
        tool_pause=(1, 1),
        pause=(40, 1.0),
        most=120_000,
    ),
}

_BLOCK = 64
#: Seconds of one answer: those of its tokens, and a start.
_START, _PER_TOKEN = 0.8, 0.012


def generate(kind: str, *, requests: int = 10_000, seed: int = 0) -> Trace:
    """Return a trace of ``requests`` requests in blocks of 64 tokens; equal arguments give equal traces.

    Memory is bounded by the sessions that are open at one time. Raises ConfigError for an unknown kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"no traffic is called {kind!r}", fix=f"Choose one of: {', '.join(KINDS)}")
    if requests < 1:
        raise ConfigError(f"{requests} requests are none", fix="Ask for at least one")
    return Trace(
        f"generated {kind}", _BLOCK, lambda: _play(KINDS[kind], requests, seed), format="generated", rows=requests
    )


class _Session:
    """One conversation: its path as runs of ids, and what its next turn will be."""

    __slots__ = ("label", "left", "number", "pause", "runs", "tokens")

    def __init__(self, number: int, runs: list[tuple[int, int]], tokens: int, left: int) -> None:
        self.number, self.runs, self.tokens, self.left = number, runs, tokens, left
        self.label, self.pause = 0, 0.0

    def grow(self, tokens: int, fresh: int) -> int:
        """Add tokens; new blocks are numbered from ``fresh``. Returns the next free number."""
        whole = self.tokens // _BLOCK
        self.tokens += tokens
        more = self.tokens // _BLOCK - whole
        if more:
            self.runs.append((fresh, more))
        return fresh + more

    def path(self) -> Path:
        return np.concatenate([np.arange(a, a + n) for a, n in self.runs]) if self.runs else np.zeros(0, np.int64)


def _play(kind: Kind, requests: int, seed: int) -> Iterator[Request]:
    rng = np.random.default_rng(seed)
    sizes = [max(1, int(_draw(rng, kind.prompt)) // _BLOCK) for _ in range(kind.prompts)]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    shares = 1 / np.arange(1, kind.prompts + 1) ** kind.zipf
    chances = np.cumsum(shares / shares.sum())
    fresh = int(starts[-1])
    waiting: list[tuple[float, int, _Session]] = []
    arrival, sessions = float(rng.exponential(1 / kind.sessions_per_second)), 0
    for _ in range(requests):
        if not waiting or arrival <= waiting[0][0]:
            n = min(int(np.searchsorted(chances, rng.random())), kind.prompts - 1)
            left = int(rng.geometric(1 / kind.turns))
            session = _Session(sessions, [(int(starts[n]), sizes[n])], sizes[n] * _BLOCK, left)
            t, sessions = arrival, sessions + 1
            arrival += float(rng.exponential(1 / kind.sessions_per_second))
        else:
            t, _, session = heapq.heappop(waiting)
        fresh = session.grow(max(1, int(_draw(rng, kind.grow))), fresh)
        answer = max(1, int(_draw(rng, kind.answer)))
        busy = _START + answer * _PER_TOKEN
        stop = TOOL_CALL if session.left > 1 and rng.random() < kind.tools else END_OF_TURN
        yield Request(
            t, session.path(), session.tokens, session.number, session.label, stop, answer, busy, session.pause
        )
        session.left -= 1
        if session.left > 0 and session.tokens < kind.most:
            fresh = session.grow(answer, fresh)
            session.label = stop
            session.pause = _draw(rng, kind.tool_pause if stop == TOOL_CALL else kind.pause)
            heapq.heappush(waiting, (t + busy + session.pause, session.number, session))


def _draw(rng: np.random.Generator, law: tuple[float, float]) -> float:
    median, sigma = law
    return float(median * np.exp(sigma * rng.standard_normal()))
