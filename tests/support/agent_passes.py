"""Agents on one engine in simulated time: real plans of passes, what passes cost as llama.cpp's were measured."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np

from ctxreuse.runtime.steps.order import RequestTurn
from ctxreuse.runtime.steps.passes import MOST, PassPlanner, Waiting

__all__ = ["Agents", "Figures", "pass_seconds", "percentile"]

SYSTEM, OWN, QUESTION, ANSWER, TURNS, PAUSE = 1_000, (400, 600), 40, 32, 6, 2.0


def pass_seconds(decoding: int, prefills: Sequence[int]) -> float:
    """Seconds of a pass on two cores: SmolLM2 on xllamacpp 2026.10.

    The library computes as many tokens of all sequences together as the shortest has left, then of the rest, and so on;
    a token among 64 or more of its sequence costs two thirds of one among fewer.
    """
    left = sorted([1] * decoding + list(prefills))
    seconds = done = 0.0
    while left:
        run = left[0] - done
        rows, each = run * len(left), 0.0035 if run >= 64 else 0.005
        seconds += 0.0015 + (rows * (0.0075 if run == 1 else each) if rows > 1 else 0.009)
        done, left = left[0], [one for one in left if one > left[0]]
    return seconds


def percentile(values: Sequence[float], share: float = 0.95) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


@dataclass
class _Context:
    n: int = 0


class Figures(NamedTuple):
    """What agents saw."""

    seconds: float
    first: list[float]
    later: list[float]
    gaps: list[float]

    def __str__(self) -> str:
        first, later, gaps = self.first, self.later, self.gaps
        return (
            f"{self.seconds:.1f} s; first mean {sum(first) / len(first):.2f} last {max(first):.2f}; later median"
            f" {percentile(later, 0.5):.2f} p95 {percentile(later):.2f}; gaps median {percentile(gaps, 0.5):.3f} p95"
            f" {percentile(gaps):.3f} most {max(gaps):.2f}"
        )


@dataclass
class _Agent:
    rng: Random
    tenant: str
    number: int
    turns: int = 0
    left: int = -1  # tokens of its answer; -1: its prompt is computed
    came: float = 0.0
    last: float = 0.0
    needs: Waiting | None = None
    context: _Context = field(default_factory=_Context)


class Agents:
    """Agents that begin at once behind one system prompt, which the first computes for all."""

    def __init__(self, count: int, *, least_slice: int = 1, turns: int = TURNS, running: int = MOST) -> None:
        """``running``: answers that may run at a time; see `PassPlanner`."""
        self.planner, self.turns, self.running, seed = PassPlanner(least_slice), turns, running, 0
        self.agents = [_Agent(Random(seed + number), "", number) for number in range(count)]
        self.first, self.later, self.gaps = list[float](), list[float](), list[float]()
        self.number = 0

    def run(self) -> Figures:
        now, queue = 0.0, list[_Agent]()  # wait for a thread
        waiting, events = list[_Agent](), list[tuple[float, int]]()
        following, active = list[_Agent](), 0
        for agent in self.agents:
            heapq.heappush(events, (0.0, agent.number))
        shared = _Context()
        while events or waiting or queue or following:
            while events and events[0][0] <= now:
                agent = self.agents[heapq.heappop(events)[1]]
                agent.came = now
                queue.append(agent)
            while queue and active < self.running:
                agent = queue.pop(0)
                active += 1
                self.number += 1
                turn = RequestTurn(self.number, agent.came, session="")
                if agent.turns:
                    tokens = QUESTION
                elif agent.number == 0:
                    tokens, shared = SYSTEM + agent.rng.randint(*OWN), agent.context
                else:
                    tokens = agent.rng.randint(*OWN)
                agent.needs = Waiting(agent.context, np.zeros(tokens, "<i4"), turn)  # type: ignore[arg-type]
                if not agent.turns and agent.number and shared.n < SYSTEM:
                    following.append(agent)
                else:
                    waiting.append(agent)
            if shared.n >= SYSTEM:
                for agent in following:
                    agent.context.n = SYSTEM
                    assert agent.needs is not None
                    agent.needs.start = SYSTEM
                waiting += following
                following.clear()
            if not waiting:
                now = events[0][0]
                continue
            needs = {id(agent.needs): agent for agent in waiting}
            chosen, limit = self.planner.plan([a.needs for a in waiting if a.needs], now, batches=len(waiting) > 1)
            took = []
            for one in chosen:
                count = min(len(one.tokens), limit or 768)
                if len(one.tokens) > count:  # slices end where blocks do, if they hold an end
                    beyond = (one.context.n + count) % 64
                    count -= beyond if beyond < count else 0
                took.append(count)
                one.context.n += count
            decoding = sum(one.decodes for one in chosen)
            seconds = pass_seconds(decoding, [n for n, one in zip(took, chosen) if not one.decodes])
            now += seconds
            self.planner.done(chosen, seconds, now)
            for one, count in zip(chosen, took):
                agent = needs[id(one)]
                waiting.remove(agent)
                if count < len(one.tokens):
                    agent.needs = Waiting(agent.context, one.tokens[count:], one.turn)  # type: ignore[arg-type]
                    waiting.append(agent)
                    continue
                if agent.left > 0:
                    self.gaps.append(now - agent.last)
                    agent.left -= 1
                else:
                    (self.later if agent.turns else self.first).append(now - agent.came)
                    agent.left = ANSWER - 1
                agent.last = now
                if agent.left:
                    agent.needs = Waiting(agent.context, np.zeros(1, "<i4"), one.turn)  # type: ignore[arg-type]
                    waiting.append(agent)
                else:
                    self.planner.end(one.turn)
                    agent.turns, agent.needs, agent.left = agent.turns + 1, None, -1
                    active -= 1
                    if agent.turns < self.turns:
                        heapq.heappush(events, (now + agent.rng.uniform(0, PAUSE), agent.number))
        return Figures(now, self.first, self.later, self.gaps)
