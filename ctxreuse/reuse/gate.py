"""The gate: whether a request may reuse moved chunks, and by which repair, as far as was measured of its model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from ctxreuse.levels import approx, damage, is_raw
from ctxreuse.model import ModelSpace
from ctxreuse.reuse.card import ChunkCard, Kind, Measured, Read, card_model

if TYPE_CHECKING:
    from ctxreuse.reuse.attend import Selection
    from ctxreuse.reuse.plan import Run

__all__ = ["Budget", "Gate", "Verdict"]

#: How many tokens a repair may compute of so many that are moved.
Budget: TypeAlias = Callable[[int], int]

#: Levels name thousandths.
_STEPS: Final = 1000


class Verdict(msgspec.Struct, frozen=True):
    """``allowed``: moved rows may be used, repaired by ``repair``, and then have the level ``level``; ``kl`` is the
    measured bound behind that (nats a token). ``reason`` tells people what was decided, and what they can do.
    ``recomputed``: layer-tokens that the repair computes, as a share of those of the moved rows."""

    allowed: bool
    repair: str
    kl: float
    level: str
    reason: str
    recomputed: float = 1.0


class Gate:
    """Immutable; any thread may ask. ``card``: what calibration measured of the model of ``space``; None: nothing.

    No model is refused by name: one whose rotary embedding is turned wrongly, or whose windows cannot see a moved
    chunk, has a card on which nothing is good enough.
    """

    def __init__(self, space: ModelSpace, card: ChunkCard | None) -> None:
        self.card = card if card is not None and card.model == card_model(space) else None
        self._name = space.architecture

    def decide(
        self, lossy: str | None, kinds: Collection[Kind], below: float = 0.0, most: float | None = None
    ) -> Verdict:
        """For a request that allows ``lossy`` at worst and would move runs of ``kinds``: of the repairs whose bound
        fits for all of these, the one that recomputes least; or, of those that recompute no larger share of the moved
        rows than ``most``, the best.

        ``below``: the KL that the sources stand for themselves, as they are kept in a lossy code; it adds up.
        """
        if lossy is None:
            return _refused("exact session: allow a lossy level, such as kl-0.05, to reuse chunks at other positions")
        if self.card is None:
            return _refused(f"no chunk card for {self._name}: run `ctxreuse calibrate NAME --chunks`")
        worst = [self._worst(repair, kinds) for repair in dict.fromkeys(m.repair for m in self.card.measured)]
        whole = [found for found in worst if found is not None]
        if not kinds or not whole:
            missing = " and ".join(sorted(kinds)) or "no"
            return _refused(f"the chunk card says nothing of {missing} runs: run `ctxreuse calibrate NAME --chunks`")
        untold = " and ".join(sorted(kind for kind in kinds if kind not in self.card.limits))
        if untold:
            return _refused(f"{untold} runs of this model cannot be told from wrong ones, which would go unnoticed")
        limit = damage(lossy)
        fitting = [one for one in whole if _bound(one, below) <= limit]
        if not fitting:
            best = min(whole, key=lambda one: (one.kl_high, one.recomputed))
            coded = f", its sources another {below:g}" if below else ""
            return _refused(
                f"not good enough: the best repair, {best.repair}, has a KL of {best.kl:.3f} (at most"
                f" {best.kl_high:.3f}){coded}, and {lossy} is allowed; allow more, or reuse exact prefixes only"
            )
        chosen = min(fitting, key=lambda one: (one.recomputed, one.kl_high))
        if most is not None:
            if chosen.recomputed > most:
                return _refused(
                    f"no repair in the budget: {chosen.repair}, the least that is good enough for {lossy}, computes"
                    f" {chosen.recomputed:.1%} of what is moved, and {most:.1%} is allowed"
                )
            chosen = min((one for one in fitting if one.recomputed <= most), key=lambda one: one.kl_high)
        bound = _bound(chosen, below)
        level = approx(f"kl-{bound:.3f}")
        return Verdict(
            True, chosen.repair, chosen.kl_high + below, level, f"kl-{bound:.3f} by {chosen.repair}", chosen.recomputed
        )

    def admit(self, lossy: str | None, runs: Sequence[Run], budget: Budget | None = None) -> tuple[Verdict, list[Run]]:
        """The verdict on these runs, and those of them that may be moved: without the ones that stood at the head of
        their prompts where these are not allowed, or would have more of the others computed than they save; and
        without those that are kept in a lossy code where that and the moving are too much together.

        ``budget``: how many tokens a repair may compute of so many that are moved.
        """
        verdict, admitted = self._admit(lossy, runs, budget)
        numbers = [run for run in runs if not _coded(run)]
        if verdict.allowed or not numbers or len(numbers) == len(runs):
            return verdict, admitted
        other, admitted = self._admit(lossy, numbers, budget)
        return (other if other.allowed else verdict), admitted

    def _admit(self, lossy: str | None, runs: Sequence[Run], budget: Budget | None) -> tuple[Verdict, list[Run]]:
        below, total = max(map(_coded, runs), default=0.0), _tokens(runs)
        verdict = self.decide(lossy, {run.kind for run in runs}, below, _share(budget, total))
        behind = [run for run in runs if run.kind == "behind"]
        if not behind or len(behind) == len(runs):
            return verdict, list(runs) if verdict.allowed else []
        left = _tokens(behind)
        without = self.decide(lossy, {"behind"}, max(map(_coded, behind)), _share(budget, left))
        dear = verdict.recomputed * total > without.recomputed * left + total - left
        if without.allowed and (dear or not verdict.allowed):
            return without, behind
        return verdict, list(runs) if verdict.allowed else []

    def reading(self, lossy: str | None, format: str = "int8", below: float = 0.0) -> tuple[Verdict, Selection | None]:
        """How runs held in ``format`` may be read, with as few of their pages as ``lossy`` allows, and which (None:
        all); what moving them stands for (``below``) adds up.

        A context of more tokens than were measured is taken for one of those: it has more pages to choose from.
        """
        if lossy is None:
            return _refused("exact session: allow a lossy level, such as kl-0.05, to attend to held runs"), None
        known = [] if self.card is None else [read for read in self.card.reads if read.format == format]
        if not known:
            return _refused(f"nothing is known of reading {format}: run `ctxreuse calibrate NAME --chunks`"), None
        fitting = [read for read in known if _bound(read, below) <= damage(lossy)]
        if not fitting:
            best = min(known, key=lambda read: read.kl_high)
            return _refused(
                f"not good enough: reading {best.words} has a KL of {best.kl:.3f} (at most {best.kl_high:.3f})"
                f", moving another {below:.3f}, and {lossy} is allowed"
            ), None
        chosen = min(fitting, key=lambda read: (1.0 if read.selection is None else read.selection.share, read.kl_high))
        level = approx(f"kl-{_bound(chosen, below):.3f}")
        reason = f"kl-{_bound(chosen, below):.3f} by reading {chosen.words}"
        return Verdict(True, "", chosen.kl_high + below, level, reason, 0.0), chosen.selection

    def exceeded(self, kind: Kind, deviation: float) -> bool:
        """True if probe rows of a run deviate more than any did whose KL was measured: then it must be computed."""
        limit = self.card.limits.get(kind) if self.card is not None else None
        return limit is None or not deviation <= limit

    def _worst(self, repair: str, kinds: Collection[Kind]) -> Measured | None:
        """Of one repair's measurements of these kinds the one with the highest bound, with the most work that any of
        them took; None if a kind was not measured."""
        assert self.card is not None
        found = [one for one in self.card.measured if one.repair == repair and one.kind in kinds]
        if not found or {one.kind for one in found} != set(kinds):
            return None
        worst = max(found, key=lambda one: one.kl_high)
        return msgspec.structs.replace(worst, recomputed=max(one.recomputed for one in found))


def _share(budget: Budget | None, tokens: int) -> float | None:
    return None if budget is None or not tokens else budget(tokens) / tokens


def _tokens(runs: Sequence[Run]) -> int:
    return sum(run.end - run.start for run in runs)


def _bound(measured: Measured | Read, below: float) -> float:
    """What the level promises: the upper bound, rounded up to what a level's name can say, and never nothing."""
    return max(1, math.ceil((measured.kl_high + below) * _STEPS - 1e-9)) / _STEPS


def _coded(run: Run) -> float:
    """The KL of the lossy code that a run's rows come from. Rows computed on something lossy are another matter: moved
    rows saw another context anyway, and that is what the card measures."""
    return 0.0 if is_raw(run.level) else damage(run.level)


def _refused(why: str) -> Verdict:
    return Verdict(False, "", math.inf, "", f"refused: {why}")
