"""How the K and V of a context came to be: which tokens were loaded at which level, and what was computed on top."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from ctxreuse.block.levels import EXACT, allowed_by, approx, is_exact, quality_key

__all__ = ["LevelRun", "Provenance", "leading", "tokens_at"]


class LevelRun(NamedTuple):
    """Tokens from ``start`` (inclusive) to ``end`` (exclusive) whose K and V are of one level."""

    start: int
    end: int
    level: str


class _LossyState(NamedTuple):
    """A lossy state: tokens from ``at`` on are computed on top of it, as long as the context has ``least`` tokens."""

    at: int
    least: int
    level: str


def leading(runs: Sequence[LevelRun], max_kl: float | None) -> int:
    """How many leading tokens a caller with the limit ``max_kl`` may use. ``runs`` cover a context from 0 on."""
    for run in runs:
        if not allowed_by(run.level, max_kl):
            return run.start
    return runs[-1].end if runs else 0


def tokens_at(runs: Sequence[LevelRun], start: int, end: int) -> dict[str, int]:
    """Tokens of each level between two positions."""
    found: dict[str, int] = {}
    for run in runs:
        shared = min(run.end, end) - max(run.start, start)
        if shared > 0:
            found[run.level] = found.get(run.level, 0) + shared
    return found


Span = tuple[int, int]


def _joined(runs: Sequence[LevelRun]) -> list[LevelRun]:
    """Ascending runs, neighbours of one level as one."""
    found: list[LevelRun] = []
    for run in runs:
        if found and (found[-1].end, found[-1].level) == (run.start, run.level):
            found[-1] = found[-1]._replace(end=run.end)
        else:
            found.append(run)
    return found


def _without(runs: Sequence[LevelRun], cut: Sequence[Span]) -> list[LevelRun]:
    """What is left of ascending runs outside ascending spans."""
    left, first = list[LevelRun](), 0
    for run in runs:
        at = run.start
        while first < len(cut) and cut[first][1] <= at:
            first += 1
        for a, b in islice(cut, first, None):
            if a >= run.end:
                break
            if at < a:
                left.append(run._replace(start=at, end=a))
            at = max(at, b)
        if at < run.end:
            left.append(run._replace(start=at))
    return left


def _spans(runs: Sequence[LevelRun]) -> tuple[Span, ...]:
    return tuple((run.start, run.end) for run in runs)


class Provenance:
    """How K and V of one context came to be. Not thread-safe: call from the context's owner."""

    def __init__(self) -> None:
        self._loaded: list[LevelRun] = []
        self._states: list[_LossyState] = []
        self._relocated: list[LevelRun] = []
        self._gaps: list[LevelRun] = []

    @property
    def relocated(self) -> tuple[Span, ...]:
        """Spans that were inserted from other positions and have not been recomputed since."""
        return _spans(self._relocated)

    @property
    def gaps(self) -> tuple[Span, ...]:
        """Spans that hold nothing yet."""
        return _spans(self._gaps)

    def load(self, start: int, blocks: Sequence[tuple[int, str]]) -> None:
        """Blocks (the tokens and the level of each) were appended from position ``start`` on."""
        at = start
        for size, level in blocks:
            last = self._loaded[-1] if self._loaded else None
            if last is not None and (last.end, last.level) == (at, level):
                self._loaded[-1] = last._replace(end=at + size)
            else:
                self._loaded.append(LevelRun(at, at + size, level))
            at += size

    def insert(self, start: int, end: int, spans: Sequence[Span], level: str) -> None:
        """Tokens ``start`` to ``end`` were appended: ``spans`` (ascending) from elsewhere, the others gaps."""
        inserted = [LevelRun(a, b, level) for a, b in spans]
        self._loaded = _joined([*self._loaded, *inserted])
        self._relocated = _joined([*self._relocated, *(run._replace(level="") for run in inserted)])
        self._gaps = _joined([*self._gaps, *_without([LevelRun(start, end, "")], spans)])

    def recompute(self, spans: Sequence[Span], n: int) -> None:
        """The rows in ``spans`` (ascending) of a context of ``n`` tokens were recomputed, in order."""
        # What was computed on rows that are better now was computed on what they were: every level is written down.
        kept = _without(self.runs(n), spans)
        lossy, self._loaded = list[str](), []
        for run in sorted([*kept, *(LevelRun(a, b, "") for a, b in spans)]):
            if not run.level:
                below = lossy + [state.level for state in self._states if state.at <= run.start]
                run = run._replace(level=_derived(below))
            if not is_exact(run.level):
                lossy = [max([*lossy, run.level], key=quality_key)]
            self._loaded.append(run)
        self._loaded = _joined(self._loaded)
        self._relocated, self._gaps = _without(self._relocated, spans), _without(self._gaps, spans)

    def mark_approximate(self, at: int, reach: int, level: str) -> None:
        """The states at ``at`` were loaded at ``level``; they reach back over ``reach`` positions."""
        if not is_exact(level):
            self._states.append(_LossyState(at, max(at - reach, 1), level))

    def recode(self, n: int, level: str) -> None:
        """All rows of a context of ``n`` tokens are kept at ``level`` from now on, or at theirs where that is worse."""
        runs = [run._replace(level=max([level, run.level], key=quality_key)) for run in self.runs(n)]
        self._loaded = _joined(runs)

    def crop(self, n: int) -> None:
        """The context ends at position ``n``."""
        self._loaded, self._relocated, self._gaps = (
            [run._replace(end=min(run.end, n)) for run in runs if run.start < n]
            for runs in (self._loaded, self._relocated, self._gaps)
        )
        self._states = [state._replace(at=min(state.at, n)) for state in self._states if state.least <= n]

    def level_at(self, position: int) -> str:
        """The level of what is computed at a position: ``exact`` or ``approx~WORST``."""
        levels = [run.level for run in self._loaded if run.start < position and not is_exact(run.level)]
        return _derived(levels + [state.level for state in self._states if state.at <= position])

    def runs(self, n: int) -> tuple[LevelRun, ...]:
        """Runs that cover positions 0 to ``n``, in order."""
        found: list[LevelRun] = []
        at = 0
        for loaded in [*self._loaded, LevelRun(n, n, EXACT)]:
            if at < loaded.start:
                found += self._computed(at, loaded.start)
            if loaded.end > loaded.start:
                found.append(loaded)
            at = loaded.end
        return tuple(_joined(found))

    def _computed(self, start: int, end: int) -> list[LevelRun]:
        # A crop may have left a lossy state inside: what was computed before it was computed on something better.
        cuts = sorted({start, end, *(state.at for state in self._states if start < state.at < end)})
        return [LevelRun(a, b, self.level_at(a)) for a, b in pairwise(cuts)]

    def worst_level(self, start: int, end: int) -> str:
        """The level at which K and V of positions ``start`` to ``end`` may be exported: ``exact`` or ``approx~…``."""
        levels = [run.level for run in self.runs(end) if run.start < end and run.end > start]
        return _derived([level for level in levels if not is_exact(level)])


def _derived(lossy: Sequence[str]) -> str:
    """The level of what is computed on top of these lossy levels."""
    return approx(max(lossy, key=quality_key)) if lossy else EXACT
