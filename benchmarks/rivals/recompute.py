"""Recompute policies for comparison: published and tried kinds that the product does not offer.

``random-15%`` (rows drawn by a seed), ``last-5%`` (a share of the rows that stand last), ``v-15%>8%`` (15 % at layer 1,
of which 8 % of all at layer 4; ``v-15%>8%@2>6`` names the layers), ``v-20%/192`` (of the 192 rows that stand last) and
``ask*v-10%`` (attention times deviation in V at layer 1; ``ask*v-10%@3``: at layer 3).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ctxreuse.identity.keys import Tokens
from ctxreuse.reuse.recompute import (
    SHARE,
    Attention,
    Deviations,
    RankingPolicy,
    RecomputePolicy,
    Role,
    Span,
    TopAttention,
    fraction,
    parse_policy,
    percent,
    positions,
    share_of,
    top_rows,
)

__all__ = ["parse"]

_RANDOM = re.compile(rf"random-({SHARE})", re.ASCII)
_LAST = re.compile(rf"last-({SHARE})", re.ASCII)
_GRADUAL = re.compile(
    rf"([kv])-({SHARE}(?:>{SHARE}){{0,3}})(?:@(\d{{1,4}}(?:>\d{{1,4}}){{0,3}}))?(?:/(\d{{1,6}}))?", re.ASCII
)
_WEIGHTED = re.compile(rf"ask\*([kv])-({SHARE})(?:@(\d{{1,4}}))?", re.ASCII)


def parse(name: str, *, seed: int = 0) -> RecomputePolicy:
    """The policy of this name, of the product's kinds or of these. Raises ConfigError."""
    return parse_policy(name, lambda part: _part(part, seed))


def _part(text: str, seed: int) -> RecomputePolicy | None:
    if (found := _RANDOM.fullmatch(text)) is not None and 0 < (share := fraction(found[1])) <= 1:
        return RandomRows(share, seed)
    if (found := _LAST.fullmatch(text)) is not None and 0 < (share := fraction(found[1])) <= 1:
        return LastShare(share)
    if (found := _WEIGHTED.fullmatch(text)) is not None and 0 < (share := fraction(found[2])) <= 1:
        return WeightedAttention(share, "k" if found[1] == "k" else "v", int(found[3] or 1))
    found = _GRADUAL.fullmatch(text)
    if found is None:
        return None
    shares = [fraction(one) for one in found[2].split(">")]
    layers = tuple(map(int, found[3].split(">"))) if found[3] else _layers(len(shares))
    near = int(found[4] or 0)
    right = all(0 < one <= 1 for one in shares) and len(layers) == len(shares) and (found[4] is None or near)
    if not right or not all(a > b for a, b in pairwise(shares)) or not all(a < b for a, b in pairwise(layers)):
        return None
    return GradualDeviation("k" if found[1] == "k" else "v", tuple(zip(shares, layers)), near)


def _layers(steps: int) -> tuple[int, ...]:
    """Layers where none are named: 1, as published, then 4, 13, …"""
    found = [1]
    while len(found) < steps:
        found.append(3 * found[-1] + 1)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class RandomRows(RecomputePolicy):
    """A share of all rows, drawn by ``seed`` and the rows' positions: what the others must beat."""

    share: float
    seed: int

    @property
    def name(self) -> str:
        return f"random-{percent(self.share)}"

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        rows = positions(runs)
        rng = np.random.default_rng([self.seed, len(rows), *rows[:1].tolist()])
        chosen: Tokens = np.sort(rng.permutation(rows)[: share_of(self.share, len(rows), budget)])
        return chosen

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return self.share


@dataclass(frozen=True, slots=True)
class LastShare(RecomputePolicy):
    """The share of all rows that is nearest to what follows."""

    share: float

    @property
    def name(self) -> str:
        return f"last-{percent(self.share)}"

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        rows = positions(runs)
        return rows[len(rows) - share_of(self.share, len(rows), budget) :]

    def further_rows(
        self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention
    ) -> Tokens:
        more = np.setdiff1d(self.rows(runs, budget + len(chosen), deviations, attention), chosen)
        return more[len(more) - min(max(budget, 0), len(more)) :]

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return share_of(self.share, tokens, tokens) / tokens if tokens else 0.0


@dataclass(frozen=True, slots=True)
class GradualDeviation(RankingPolicy):
    """The share of rows that lies farthest from fresh ones, layer after layer.

    ``steps``: (share, layer), layers ascending and shares falling: what is kept at one layer is compared again at the
    next, where differences that the first layers do not show have grown. ``near``: only so many rows that stand last
    are compared (0: all), and shares are of these.
    """

    role: Role
    steps: tuple[tuple[float, int], ...]
    near: int = 0

    @property
    def name(self) -> str:
        shares = ">".join(percent(share) for share, _ in self.steps)
        usual = tuple(layer for _, layer in self.steps) == _layers(len(self.steps))
        layers = "" if usual else "@" + ">".join(str(layer) for _, layer in self.steps)
        return f"{self.role}-{shares}{layers}" + (f"/{self.near}" if self.near else "")

    def further_rows(
        self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention
    ) -> Tokens:
        rows = positions(runs)[-self.near :]
        total = len(rows)
        for share, layer in self.steps:
            if not len(rows):
                break
            far = deviations(rows, layer, self.role)
            rows = top_rows(rows, far, ~np.isin(rows, chosen), share_of(share, total, budget))
        return rows

    def work(self, tokens: int, runs: int, layers: int) -> float:
        share, before, probed = 1.0, 0, 0.0
        for kept, layer in self.steps:
            probed += share * (layer - before) / max(layers, 1)
            share, before = kept, layer
        of = min(self.near, tokens) / tokens if self.near and tokens else 1.0
        return min(1.0, of * (probed + share))


@dataclass(frozen=True, slots=True)
class WeightedAttention(RankingPolicy):
    """The share of rows with the most attention times deviation: about what the attention gets wrong of them."""

    share: float
    role: Role
    layer: int = 1

    @property
    def name(self) -> str:
        return f"ask*{self.role}-{percent(self.share)}" + (f"@{self.layer}" if self.layer != 1 else "")

    def further_rows(
        self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention
    ) -> Tokens:
        rows = positions(runs)
        if not len(rows) or budget <= 0:
            return rows[:0]
        far = np.nan_to_num(deviations(rows, self.layer, self.role), nan=np.inf).astype(np.float64)
        scores = np.nan_to_num(attention(rows), nan=np.inf).astype(np.float64) * np.sqrt(far)
        return top_rows(rows, scores, ~np.isin(rows, chosen), share_of(self.share, len(rows), budget))

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return min(1.0, TopAttention(self.share).work(tokens, runs, layers) + self.layer / max(layers, 1))
