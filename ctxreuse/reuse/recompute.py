"""Recompute policies: which rows of relocated runs are recomputed, by names that settings and profiles write.

``none`` (as stored), ``rotate`` (K rotated), ``first-8`` (rows of each run), ``last-32`` (of all rows those that stand
last), ``every-12`` (one row of 12), ``v-5%`` and ``k-5%`` (the share of all rows that deviates most in V or K at layer
1; ``v-5%@3``: at layer 3), ``ask-10%`` (the share that the prompt's end attends to most), and sums such as
``first-4+v-5%``. With ``+drift`` at the end the rows left alone are corrected by the drift of the recomputed ones.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = [
    "PROBE_QUERIES",
    "SHARE",
    "Attention",
    "Deviations",
    "FirstRows",
    "LastRows",
    "NoRecompute",
    "RankingPolicy",
    "RecomputePolicy",
    "Role",
    "Span",
    "Strided",
    "TopAttention",
    "TopDeviation",
    "Union",
    "WithDriftCorrection",
    "parse_policy",
    "percent",
    "positions",
    "probe_layers",
    "share_of",
    "top_rows",
]

Role: TypeAlias = Literal["k", "v"]

#: ``deviations(positions int32 [n], layer, role)``: float32 [n], the squared distance between fresh and stored K or V
#: at ``layer``, summed over heads and dims.
Deviations: TypeAlias = Callable[[Tokens, int, Role], npt.NDArray[np.float32]]

#: ``attention(positions int32 [n])``: float32 [n], the attention these rows get from the last `PROBE_QUERIES` tokens of
#: the prompt in the model's first layers (`probe_layers`): softmax weights, summed over layers, heads and queries.
Attention: TypeAlias = Callable[[Tokens], npt.NDArray[np.float32]]

PROBE_QUERIES: Final = 32
#: Share of the layers, from the first on, that the attention probe runs through. A question finds its answer in the
#: middle ones: over 27 questions on short chats (SmolLM2, first-4+last-16+every-20+ask-5%+drift) the answer's KL is
#: .0584 with 5 of its 30 layers and .0541 with 20. For text that goes on it matters less: over 8 x 256 relocated
#: tokens, with ask-5%, .0174 with 10, .0180 with 20, .0157 with all.
_PROBE_DEPTH: Final = 2 / 3
_MOST_PARTS: Final = 8

SHARE = r"\d{1,3}(?:\.\d{1,3})?%"
_COUNTED = re.compile(r"(first|last|every)-(\d{1,6})", re.ASCII)
_DEVIATION = re.compile(rf"([kv])-({SHARE})(?:@(\d{{1,4}}))?", re.ASCII)
_ATTENTION = re.compile(rf"ask-({SHARE})", re.ASCII)


class Span(Protocol):
    """A relocated run, such as `ChunkRun`: positions ``start`` to ``end`` of the prompt."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class RecomputePolicy(ABC):
    """Chooses rows. Immutable; any thread may call, and equal arguments give equal rows."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As it is written; `parse_policy` gives an equal policy for it."""

    @property
    def rotates(self) -> bool:
        """False only for ``none``: K is not even rotated to its new positions."""
        return True

    @property
    def corrects_drift(self) -> bool:
        """True if rows left alone are corrected by the drift of the recomputed ones (`ChunkOps.recompute_rows`)."""
        return False

    @abstractmethod
    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        """Choose at most ``budget`` positions in ``runs``, ascending, int32."""

    def further_rows(
        self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention
    ) -> Tokens:
        """As `rows`, but none of ``chosen``, which other policies have chosen before."""
        found = self.rows(runs, budget + len(chosen), deviations, attention)
        return np.setdiff1d(found, chosen)[: max(budget, 0)]

    @abstractmethod
    def work(self, tokens: int, runs: int, layers: int) -> float:
        """Layer-tokens computed over ``runs`` runs of ``tokens`` tokens together in a model of ``layers`` layers.

        As a share of computing them all; the search for rows is part of it.
        """


class RankingPolicy(RecomputePolicy):
    """A policy that compares all rows: alone it chooses as it does beside others that have chosen none."""

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        return self.further_rows(np.zeros(0, np.int32), runs, budget, deviations, attention)

    @abstractmethod
    def further_rows(
        self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention
    ) -> Tokens: ...


@dataclass(frozen=True, slots=True)
class NoRecompute(RecomputePolicy):
    """Relocates rows and recomputes none of them."""

    rotate: bool = True

    @property
    def name(self) -> str:
        return "rotate" if self.rotate else "none"

    @property
    def rotates(self) -> bool:
        return self.rotate

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        return np.zeros(0, np.int32)

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class FirstRows(RecomputePolicy):
    """The first ``count`` rows of each run, which were attention sinks where they stood (EPIC, 2025)."""

    count: int

    @property
    def name(self) -> str:
        return f"first-{self.count}"

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        # A budget too small for all takes the same number from each run, as the first rows matter most.
        found = [np.arange(run.start, min(run.end, run.start + self.count), dtype=np.int32) for run in runs]
        depth = np.concatenate([np.arange(len(one)) for one in found]) if found else np.zeros(0, np.intp)
        rows = np.concatenate(found) if found else np.zeros(0, np.int32)
        chosen: Tokens = np.sort(rows[np.argsort(depth, kind="stable")[: max(budget, 0)]])
        return chosen

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return min(1.0, self.count * runs / tokens) if tokens else 0.0


@dataclass(frozen=True, slots=True)
class LastRows(RankingPolicy):
    """The ``count`` rows nearest to what follows, which attends there most."""

    count: int

    @property
    def name(self) -> str:
        return f"last-{self.count}"

    def further_rows(
        self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention
    ) -> Tokens:
        rows = positions(runs)
        last = rows[len(rows) - min(self.count, len(rows)) :]
        more: Tokens = last[~np.isin(last, chosen)]
        return more[len(more) - min(max(budget, 0), len(more)) :]

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return min(self.count, tokens) / tokens if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Strided(RecomputePolicy):
    """One row of every ``step`` of each run: a fair sample of the drift of the others."""

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
class TopDeviation(RankingPolicy):
    """The share of rows that lies farthest from freshly computed ones at a layer (CacheBlend, 2025)."""

    role: Role
    share: float
    layer: int = 1

    @property
    def name(self) -> str:
        return f"{self.role}-{percent(self.share)}" + (f"@{self.layer}" if self.layer != 1 else "")

    def further_rows(
        self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention
    ) -> Tokens:
        rows = positions(runs)
        if not len(rows):
            return rows
        # All rows are compared, also the chosen: rows behind them attend to them as they will be.
        far = deviations(rows, self.layer, self.role)
        return top_rows(rows, far, ~np.isin(rows, chosen), share_of(self.share, len(rows), budget))

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return min(1.0, self.layer / max(layers, 1) + self.share)


@dataclass(frozen=True, slots=True)
class TopAttention(RankingPolicy):
    """The share of rows that the prompt's end attends to most, as an attention probe tells."""

    share: float

    @property
    def name(self) -> str:
        return f"ask-{percent(self.share)}"

    def further_rows(
        self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention
    ) -> Tokens:
        rows = positions(runs)
        if not len(rows) or budget <= 0:
            return rows[:0]
        return top_rows(rows, attention(rows), ~np.isin(rows, chosen), share_of(self.share, len(rows), budget))

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return min(1.0, self.share + min(1.0, PROBE_QUERIES / tokens * _PROBE_DEPTH if tokens else 0.0))


@dataclass(frozen=True, slots=True)
class Union(RecomputePolicy):
    """One policy after the other, each with the budget that those before it left."""

    parts: tuple[RecomputePolicy, ...]

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        chosen: Tokens = np.zeros(0, np.int32)
        for part in self.parts:
            more = part.further_rows(chosen, runs, max(budget - len(chosen), 0), deviations, attention)
            chosen = np.union1d(chosen, more).astype(np.int32)
        return chosen

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return min(1.0, sum(part.work(tokens, runs, layers) for part in self.parts))


@dataclass(frozen=True, slots=True)
class WithDriftCorrection(RecomputePolicy):
    """As another policy; the rows it leaves are corrected by the drift of those it chooses."""

    policy: RecomputePolicy

    @property
    def name(self) -> str:
        return f"{self.policy.name}+drift"

    @property
    def rotates(self) -> bool:
        return self.policy.rotates

    @property
    def corrects_drift(self) -> bool:
        return True

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        return self.policy.rows(runs, budget, deviations, attention)

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return self.policy.work(tokens, runs, layers)


def parse_policy(name: str, further: Callable[[str], RecomputePolicy | None] = lambda part: None) -> RecomputePolicy:
    """The policy of this name. ``further`` parses parts of other kinds. Raises ConfigError for an unknown name."""
    if name in ("none", "rotate"):
        return NoRecompute(rotate=name == "rotate")
    chosen = name.removesuffix("+drift")
    parts = [_part(part) or further(part) for part in chosen.split("+")[: _MOST_PARTS + 1]]
    known = tuple(part for part in parts if part is not None)
    if len(known) < len(parts) or len(parts) > _MOST_PARTS:
        kinds = "none, rotate, first-8, last-16, every-12, v-5%, k-15%@2, ask-10%"
        raise ConfigError(
            f"no such recompute policy: {name[:64]!r}", fix=f"Choose {kinds} or a sum: first-4+v-5%, every-12+drift"
        )
    policy = known[0] if len(known) == 1 else Union(known)
    return policy if chosen == name else WithDriftCorrection(policy)


def _part(text: str) -> RecomputePolicy | None:
    if (found := _COUNTED.fullmatch(text)) is not None and int(found[2]):
        kinds: dict[str, Callable[[int], RecomputePolicy]] = {"first": FirstRows, "last": LastRows, "every": Strided}
        return kinds[found[1]](int(found[2]))
    if (found := _ATTENTION.fullmatch(text)) is not None and 0 < (share := fraction(found[1])) <= 1:
        return TopAttention(share)
    if (found := _DEVIATION.fullmatch(text)) is not None and 0 < (share := fraction(found[2])) <= 1:
        return TopDeviation("k" if found[1] == "k" else "v", share, int(found[3] or 1))
    return None


def probe_layers(space: ModelSpace) -> int:
    """How many of a model's layers the attention probe runs through: one of them sees all tokens, if any does."""
    least = math.ceil(len(space.layers) * _PROBE_DEPTH)
    full = next((i + 1 for i, layer in enumerate(space.layers) if layer.blocked and not layer.window), 0)
    return max(least, full)


def positions(runs: Sequence[Span]) -> Tokens:
    """The positions of all runs, int32."""
    spans = [np.arange(run.start, run.end, dtype=np.int32) for run in runs]
    return np.concatenate(spans) if spans else np.zeros(0, np.int32)


def top_rows(rows: Tokens, scores: npt.NDArray[np.floating], free: npt.NDArray[np.bool_], count: int) -> Tokens:
    """The ``count`` free rows with the highest scores, ascending; of equal ones the first, and those that are NaN."""
    rows, found = rows[free], np.nan_to_num(scores, nan=np.inf).astype(np.float64)[free]
    return np.sort(rows[np.argsort(-found, kind="stable")[:count]])


def share_of(share: float, total: int, budget: int) -> int:
    """How many of ``total`` rows a share is, rounded up, at most ``budget``."""
    return max(0, min(budget, -int(-share * total // 1)))


def percent(share: float) -> str:
    """A share as names write it."""
    return f"{share * 100:g}%"


def fraction(text: str) -> float:
    """The share that ``5%`` names."""
    return float(text.removesuffix("%")) / 100
