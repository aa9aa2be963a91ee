"""The quality gate: whether a request may reuse relocated chunks, and by which recompute policy, as far as measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.block.levels import approx, expected_kl, is_raw
from ctxreuse.codec.profile import model_digest
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.reuse.inplace.pages import Selection
from ctxreuse.reuse.profile import ChunkKind, ChunkProfile, InPlaceMeasurement, PolicyMeasurement
from ctxreuse.reuse.recompute import Span
from ctxreuse.reuse.search import ChunkRun

__all__ = ["PROBES", "Budget", "GateDecision", "QualityGate", "deviation", "probe_rows"]

#: How many tokens a policy may recompute of so many that are relocated.
Budget: TypeAlias = Callable[[int], int]

#: Rows of one run that are compared with freshly computed ones.
PROBES: Final = 16
#: Levels name thousandths.
_STEPS: Final = 1000


class GateDecision(msgspec.Struct, frozen=True):
    """Whether relocated rows may be used, and how.

    ``policy``: the recompute policy; ``level``: the level of the rows then; ``kl``: the measured bound behind it (nats
    a token); ``recomputed``: layer-tokens that the policy computes, as a share of those of the relocated rows.
    ``reason`` tells people what was decided, and what they can do.
    """

    allowed: bool
    policy: str
    kl: float
    level: str
    reason: str
    recomputed: float = 1.0


class QualityGate:
    """Decides by a model's chunk profile (None: refuses). Immutable; any thread may call.

    No model is refused by name: one whose rotary embedding is wrong, or whose windows cannot see a relocated chunk, has
    a profile on which nothing is good enough.
    """

    def __init__(self, space: ModelSpace, profile: ChunkProfile | None) -> None:
        self.profile = profile if profile is not None and profile.model == model_digest(space) else None
        self._name = space.architecture

    def decide(
        self, max_kl: float | None, kinds: Collection[ChunkKind], below: float = 0.0, most: float | None = None
    ) -> GateDecision:
        """Choose the policy whose bound fits ``max_kl`` for runs of all these kinds and that recomputes least.

        With ``most``: of those that recompute at most this share of the relocated rows, the best one. ``below``: the KL
        of the lossy code that the sources are kept in; it adds up.
        """
        if max_kl is None:
            return _refused("exact session: allow some KL, such as max_kl=0.05, to reuse chunks at other positions")
        if self.profile is None:
            return _refused(f"no chunk profile for {self._name}: run `ctxreuse calibrate NAME --chunks`")
        worst = [self._worst(policy, kinds) for policy in dict.fromkeys(m.policy for m in self.profile.measured)]
        known = [found for found in worst if found is not None]
        if not kinds or not known:
            missing = " and ".join(sorted(kinds)) or "no"
            return _refused(f"the chunk profile has nothing on {missing} runs: run `ctxreuse calibrate NAME --chunks`")
        unlimited = " and ".join(sorted(kind for kind in kinds if kind not in self.profile.limits))
        if unlimited:
            return _refused(f"{unlimited} runs of this model look like wrong ones, which would go unnoticed")
        fitting = [one for one in known if _bound(one, below) <= max_kl]
        if not fitting:
            best = min(known, key=lambda one: (one.kl_high, one.recomputed))
            coded = f", its sources another {below:g}" if below else ""
            return _refused(
                f"not good enough: the best policy, {best.policy}, has a KL of {best.kl:.3f} (at most"
                f" {best.kl_high:.3f}){coded}, and {max_kl:g} is allowed; allow more, or reuse exact prefixes only"
            )
        chosen = min(fitting, key=lambda one: (one.recomputed, one.kl_high))
        if most is not None:
            if chosen.recomputed > most:
                return _refused(
                    f"no policy within the budget: {chosen.policy}, the cheapest that is good enough for a KL of"
                    f" {max_kl:g}, recomputes {chosen.recomputed:.1%} of what is relocated, and {most:.1%} is allowed"
                )
            chosen = min((one for one in fitting if one.recomputed <= most), key=lambda one: one.kl_high)
        bound = f"kl-{_bound(chosen, below):.3f}"
        reason = f"{bound} by {chosen.policy}"
        return GateDecision(True, chosen.policy, chosen.kl_high + below, approx(bound), reason, chosen.recomputed)

    def admit(
        self, max_kl: float | None, runs: Sequence[ChunkRun], budget: Budget | None = None
    ) -> tuple[GateDecision, list[ChunkRun]]:
        """Decide on these runs, and choose those of them that may be relocated.

        Left out are runs from the head of their prompts where these are not allowed, or would have more of the others
        recomputed than they save; and runs kept in a lossy code where that and relocation are too much together.
        """
        decision, admitted = self._admit(max_kl, runs, budget)
        uncoded = [run for run in runs if not _coded(run)]
        if decision.allowed or not uncoded or len(uncoded) == len(runs):
            return decision, admitted
        other, admitted = self._admit(max_kl, uncoded, budget)
        return (other if other.allowed else decision), admitted

    def _admit(
        self, max_kl: float | None, runs: Sequence[ChunkRun], budget: Budget | None
    ) -> tuple[GateDecision, list[ChunkRun]]:
        below, total = max(map(_coded, runs), default=0.0), _tokens(runs)
        decision = self.decide(max_kl, {run.kind for run in runs}, below, _share(budget, total))
        behind = [run for run in runs if run.kind == "behind"]
        if not behind or len(behind) == len(runs):
            return decision, list(runs) if decision.allowed else []
        left = _tokens(behind)
        without = self.decide(max_kl, {"behind"}, max(map(_coded, behind)), _share(budget, left))
        dear = decision.recomputed * total > without.recomputed * left + total - left
        if without.allowed and (dear or not decision.allowed):
            return without, behind
        return decision, list(runs) if decision.allowed else []

    def in_place(
        self, max_kl: float | None, format: str = "int8", below: float = 0.0, *, whole: bool = False
    ) -> tuple[GateDecision, Selection | None]:
        """Choose how runs pinned in ``format`` may be read: as few of their pages as ``max_kl`` allows (None: all).

        ``below``: the KL of what was lossy in them before; it adds up. ``whole``: all pages are read. A context of more
        tokens than were measured is taken for one of those: it has more pages to choose from.
        """
        if max_kl is None:
            return _refused("exact session: allow some KL, such as max_kl=0.05, to attend to pinned runs"), None
        known = (
            []
            if self.profile is None
            else [one for one in self.profile.in_place if one.format == format and not (whole and one.selection)]
        )
        if not known:
            return _refused(f"nothing is known of {format} in place: run `ctxreuse calibrate NAME --chunks`"), None
        fitting = [one for one in known if _bound(one, below) <= max_kl]
        if not fitting:
            best = min(known, key=lambda one: one.kl_high)
            return _refused(
                f"not good enough: reading {best.words} has a KL of {best.kl:.3f} (at most {best.kl_high:.3f})"
                f", what was lossy before another {below:.3f}, and {max_kl:g} is allowed"
            ), None
        chosen = min(fitting, key=lambda one: (1.0 if one.selection is None else one.selection.share, one.kl_high))
        bound = f"kl-{_bound(chosen, below):.3f}"
        reason = f"{bound} by reading {chosen.words}"
        return GateDecision(True, "", chosen.kl_high + below, approx(bound), reason, 0.0), chosen.selection

    def exceeded(self, kind: ChunkKind, deviation: float) -> bool:
        """True if probe rows of a run deviate more than any did whose KL was measured: then it must be recomputed."""
        limit = self.profile.limits.get(kind) if self.profile is not None else None
        return limit is None or not deviation <= limit

    def _worst(self, policy: str, kinds: Collection[ChunkKind]) -> PolicyMeasurement | None:
        """Of a policy's measurements of these kinds that with the highest bound, and the most work of any of them.

        None if a kind was not measured.
        """
        assert self.profile is not None
        found = [one for one in self.profile.measured if one.policy == policy and one.kind in kinds]
        if not found or {one.kind for one in found} != set(kinds):
            return None
        worst = max(found, key=lambda one: one.kl_high)
        return msgspec.structs.replace(worst, recomputed=max(one.recomputed for one in found))


def probe_rows(run: Span) -> Tokens:
    """Up to `PROBES` positions of a run, int32 ascending, evenly spread; all of them in a short one.

    Calibration probes as requests do, so that a profile's limits mean the same.
    """
    count = min(PROBES, run.end - run.start)
    found: Tokens = (run.start + (np.arange(count) * 2 + 1) * (run.end - run.start) // (2 * count)).astype("<i4")
    return found


def deviation(distance: npt.NDArray[np.float32], length: npt.NDArray[np.float32]) -> float:
    """Of the probe rows of one run: squared distances over squared lengths (see `ChunkOps.deviations`).

    Infinite if that is not a number, as for damaged rows.
    """
    total = float(length.sum(dtype=np.float64))
    found = float(distance.sum(dtype=np.float64)) / total if total > 0 else math.inf
    return found if math.isfinite(found) else math.inf


def _share(budget: Budget | None, tokens: int) -> float | None:
    return None if budget is None or not tokens else budget(tokens) / tokens


def _tokens(runs: Sequence[ChunkRun]) -> int:
    return sum(run.end - run.start for run in runs)


def _bound(measured: PolicyMeasurement | InPlaceMeasurement, below: float) -> float:
    """What the level promises: the upper bound, rounded up to what a level's name can say, and more than 0."""
    return max(1, math.ceil((measured.kl_high + below) * _STEPS - 1e-9)) / _STEPS


def _coded(run: ChunkRun) -> float:
    """The KL of the lossy code of a run's rows.

    Rows computed on top of something lossy do not count: relocated rows saw another context anyway, and that is what
    was measured.
    """
    return 0.0 if is_raw(run.level) else expected_kl(run.level)


def _refused(why: str) -> GateDecision:
    return GateDecision(False, "", math.inf, "", f"refused: {why}")
