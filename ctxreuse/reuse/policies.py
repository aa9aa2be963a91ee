"""The published repairs of moved runs, and ours, one by one; `ctxreuse.reuse.sums` combines them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ctxreuse.keys import Tokens
from ctxreuse.reuse.repair import DEPTH, LOOKING, Attention, Deviations, Repair, Role, Span

__all__ = [
    "Asked",
    "Deviant",
    "Every",
    "First",
    "Last",
    "Nothing",
    "Random",
    "layers_of",
    "share_of",
]


@dataclass(frozen=True, slots=True)
class Nothing(Repair):
    """Moves rows and computes none of them."""

    turn: bool = True

    @property
    def name(self) -> str:
        return "rotate" if self.turn else "none"

    @property
    def turned(self) -> bool:
        return self.turn

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        return np.zeros(0, np.int32)

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class First(Repair):
    """The first ``count`` rows of each run, which were attention sinks where they stood (EPIC, 2025)."""

    count: int

    @property
    def name(self) -> str:
        return f"first-{self.count}"

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        # A budget too small for all takes the same number from each run, as the first rows matter most.
        wanted = max(budget, 0)
        found = [np.arange(run.start, min(run.end, run.start + self.count), dtype=np.int32) for run in runs]
        depth = np.concatenate([np.arange(len(one)) for one in found]) if found else np.zeros(0, np.intp)
        rows = np.concatenate(found) if found else np.zeros(0, np.int32)
        chosen: Tokens = np.sort(rows[np.argsort(depth, kind="stable")[:wanted]])
        return chosen

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return min(1.0, self.count * runs / tokens) if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Every(Repair):
    """One row of every ``step`` of each run: no choice, but a fair sample of what the others are off."""

    step: int

    @property
    def name(self) -> str:
        return f"every-{self.step}"

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        found = [np.arange(run.start + self.step // 2, run.end, self.step, dtype=np.int32) for run in runs]
        rows = np.concatenate(found) if found else np.zeros(0, np.int32)
        wanted = max(0, min(len(rows), budget))
        chosen: Tokens = rows[np.arange(wanted) * len(rows) // max(wanted, 1)]
        return chosen

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return 1 / self.step


@dataclass(frozen=True, slots=True)
class Last(Repair):
    """The rows nearest to what is said next, which looks there most: ``most`` of them or a ``share`` of all."""

    most: int = 0
    share: float = 0.0

    @property
    def name(self) -> str:
        return f"last-{self.most or _percent(self.share)}"

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        rows = _positions(runs)
        wanted = self._wanted(len(rows), budget)
        return rows[len(rows) - wanted :]

    def beyond(
        self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention
    ) -> Tokens:
        more = np.setdiff1d(self.rows(runs, budget + len(chosen), deviations, attention), chosen)
        return more[len(more) - min(max(budget, 0), len(more)) :]

    def _wanted(self, total: int, budget: int) -> int:
        return max(0, min(self.most, total, budget)) if self.most else share_of(self.share, total, budget)

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return self._wanted(tokens, tokens) / tokens if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Random(Repair):
    """A share of all rows, drawn by ``seed`` and the rows' positions: what the others must beat."""

    share: float
    seed: int

    @property
    def name(self) -> str:
        return f"random-{_percent(self.share)}"

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        rows = _positions(runs)
        rng = np.random.default_rng([self.seed, len(rows), *rows[:1].tolist()])
        chosen: Tokens = np.sort(rng.permutation(rows)[: share_of(self.share, len(rows), budget)])
        return chosen

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return self.share


@dataclass(frozen=True, slots=True)
class Deviant(Repair):
    """The share of rows that lies farthest from freshly computed ones (CacheBlend, 2025).

    ``steps``: (share, layer), layers ascending and shares falling: what is kept at one layer is compared again at the
    next, where differences that the first layers do not show have grown. ``near``: only so many rows that stand last
    are compared (0: all), and shares are of these: what is said next looks there most.
    """

    role: Role
    steps: tuple[tuple[float, int], ...]
    near: int = 0

    @property
    def name(self) -> str:
        shares = ">".join(_percent(share) for share, _ in self.steps)
        usual = tuple(layer for _, layer in self.steps) == layers_of(len(self.steps))
        layers = "" if usual else "@" + ">".join(str(layer) for _, layer in self.steps)
        return f"{self.role}-{shares}{layers}" + (f"/{self.near}" if self.near else "")

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        return self.beyond(np.zeros(0, np.int32), runs, budget, deviations, attention)

    def beyond(
        self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention
    ) -> Tokens:
        rows = _positions(runs)[-self.near :]
        total = len(rows)
        for share, layer in self.steps:
            if not len(rows):
                break
            # All rows are compared, also the chosen: rows behind them attend to how they will be.
            far = np.nan_to_num(deviations(rows, layer, self.role), nan=np.inf).astype(np.float64)
            free = ~np.isin(rows, chosen)
            rows, far = rows[free], far[free]
            rows = np.sort(rows[np.argsort(-far, kind="stable")[: share_of(share, total, budget)]])
        return rows

    def work(self, tokens: int, runs: int, layers: int) -> float:
        share, before, looked = 1.0, 0, 0.0
        for kept, layer in self.steps:
            looked += share * (layer - before) / max(layers, 1)
            share, before = kept, layer
        of = min(self.near, tokens) / tokens if self.near and tokens else 1.0
        return min(1.0, of * (looked + share))


@dataclass(frozen=True, slots=True)
class Asked(Repair):
    """The share of rows that what the prompt ends with attends to most, as a first look over all of them tells.

    ``by``: attention times how far the rows lie in this role at ``layer`` (the root of `Deviations`), which is about
    what the look gets wrong of them; None: attention alone.
    """

    share: float
    by: Role | None = None
    layer: int = 1

    @property
    def name(self) -> str:
        by = f"*{self.by}" if self.by else ""
        return f"ask{by}-{_percent(self.share)}" + (f"@{self.layer}" if self.layer != 1 else "")

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        return self.beyond(np.zeros(0, np.int32), runs, budget, deviations, attention)

    def beyond(
        self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention
    ) -> Tokens:
        rows = _positions(runs)
        if not len(rows) or budget <= 0:
            return rows[:0]
        looked = np.nan_to_num(attention(rows), nan=np.inf).astype(np.float64)
        if self.by is not None:
            looked *= np.sqrt(np.nan_to_num(deviations(rows, self.layer, self.by), nan=np.inf).astype(np.float64))
        total, free = len(rows), ~np.isin(rows, chosen)
        rows, looked = rows[free], looked[free]
        return np.sort(rows[np.argsort(-looked, kind="stable")[: share_of(self.share, total, budget)]])

    def work(self, tokens: int, runs: int, layers: int) -> float:
        compared = self.layer / max(layers, 1) if self.by else 0.0
        looked = LOOKING / tokens * DEPTH if tokens else 0.0
        return min(1.0, self.share + compared + min(1.0, looked))


def _positions(runs: Sequence[Span]) -> Tokens:
    spans = [np.arange(run.start, run.end, dtype=np.int32) for run in runs]
    return np.concatenate(spans) if spans else np.zeros(0, np.int32)


def share_of(share: float, total: int, budget: int) -> int:
    """How many of ``total`` rows a share is, rounded up, at most ``budget``."""
    return max(0, min(budget, -int(-share * total // 1)))


def _percent(share: float) -> str:
    return f"{share * 100:g}%"


def layers_of(steps: int) -> tuple[int, ...]:
    """Check layers where none are named: 1, as published, then 4, 13, …"""
    found = [1]
    while len(found) < steps:
        found.append(3 * found[-1] + 1)
    return tuple(found)
