"""Repairs made of repairs: several one after the other, and any of them with drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ctxreuse.keys import Tokens
from ctxreuse.reuse.repair import Attention, Deviations, Repair, Span

__all__ = ["Both", "Drifting"]


@dataclass(frozen=True, slots=True)
class Both(Repair):
    """One repair after the other: each has what budget those before it left."""

    parts: tuple[Repair, ...]

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        chosen: Tokens = np.zeros(0, np.int32)
        for part in self.parts:
            more = part.beyond(chosen, runs, max(budget - len(chosen), 0), deviations, attention)
            chosen = np.union1d(chosen, more).astype(np.int32)
        return chosen

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return min(1.0, sum(part.work(tokens, runs, layers) for part in self.parts))


@dataclass(frozen=True, slots=True)
class Drifting(Repair):
    """As another repair, and the rows that it leaves are set right by what those that it computes were off."""

    repair: Repair

    @property
    def name(self) -> str:
        return f"{self.repair.name}+drift"

    @property
    def turned(self) -> bool:
        return self.repair.turned

    @property
    def drifts(self) -> bool:
        return True

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        return self.repair.rows(runs, budget, deviations, attention)

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return self.repair.work(tokens, runs, layers)
