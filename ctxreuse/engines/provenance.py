"""How the K and V of a context came to be: which tokens were loaded at which level, and what was computed on top."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from ctxreuse.levels import EXACT, approx, fits, is_exact, rank

__all__ = ["Provenance", "Run", "leading", "tokens_at"]


class Run(NamedTuple):
    """Tokens from ``start`` (inclusive) to ``end`` (exclusive) whose K and V are of one level."""

    start: int
    end: int
    level: str


class _Stain(NamedTuple):
    """A lossy state: what is computed from position ``at`` on stands on it, as long as the context has ``least``."""

    at: int
    least: int
    level: str


def leading(runs: Sequence[Run], lossy: str | None) -> int:
    """How many leading tokens may be used by whoever allows ``lossy`` at worst. ``runs`` cover a context from 0 on."""
    for run in runs:
        if not fits(run.level, lossy):
            return run.start
    return runs[-1].end if runs else 0


def tokens_at(runs: Sequence[Run], start: int, end: int) -> dict[str, int]:
    """Tokens of each level between two positions."""
    found: dict[str, int] = {}
    for run in runs:
        shared = min(run.end, end) - max(run.start, start)
        if shared > 0:
            found[run.level] = found.get(run.level, 0) + shared
    return found


Span = tuple[int, int]


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Ascending runs, neighbours of one level as one."""
    found: list[Run] = []
    for run in runs:
        if found and (found[-1].end, found[-1].level) == (run.start, run.level):
            found[-1] = found[-1]._replace(end=run.end)
        else:
            found.append(run)
    return found


def _without(runs: Sequence[Run], gone: Sequence[Span]) -> list[Run]:
    """What is left of ascending runs outside ascending spans."""
    left, first = list[Run](), 0
    for run in runs:
        at = run.start
        while first < len(gone) and gone[first][1] <= at:
            first += 1
        for a, b in islice(gone, first, None):
            if a >= run.end:
                break
            if at < a:
                left.append(run._replace(start=at, end=a))
            at = max(at, b)
        if at < run.end:
            left.append(run._replace(start=at))
    return left


def _spans(runs: Sequence[Run]) -> tuple[Span, ...]:
    return tuple((run.start, run.end) for run in runs)


class Provenance:
    """The history of one context. Not thread-safe: its context's owner calls."""

    def __init__(self) -> None:
        self._loaded: list[Run] = []
        self._stains: list[_Stain] = []
        self._moved: list[Run] = []
        self._gaps: list[Run] = []

    @property
    def moved(self) -> tuple[Span, ...]:
        """Spans that were moved to where they are and have not been computed since."""
        return _spans(self._moved)

    @property
    def gaps(self) -> tuple[Span, ...]:
        """Spans that hold nothing yet."""
        return _spans(self._gaps)

    def load(self, start: int, size: int, levels: Sequence[str]) -> None:
        """Blocks of ``size`` tokens each were appended from position ``start`` on."""
        for i, level in enumerate(levels):
            at = start + i * size
            last = self._loaded[-1] if self._loaded else None
            if last is not None and (last.end, last.level) == (at, level):
                self._loaded[-1] = last._replace(end=at + size)
            else:
                self._loaded.append(Run(at, at + size, level))

    def place(self, start: int, end: int, spans: Sequence[Span], level: str) -> None:
        """Tokens ``start`` to ``end`` were appended: ``spans`` (ascending) moved there, the others gaps."""
        moved = [Run(a, b, level) for a, b in spans]
        self._loaded = _joined([*self._loaded, *moved])
        self._moved = _joined([*self._moved, *(run._replace(level="") for run in moved)])
        self._gaps = _joined([*self._gaps, *_without([Run(start, end, "")], spans)])

    def compute(self, spans: Sequence[Span], n: int) -> None:
        """The rows in ``spans`` (ascending) of a context of ``n`` tokens were computed, in order, on what is held."""
        # What stands on rows that are better now was computed on what they were before: every level is written down.
        kept = _without(self.runs(n), spans)
        lossy, self._loaded = list[str](), []
        for run in sorted([*kept, *(Run(a, b, "") for a, b in spans)]):
            if not run.level:
                below = lossy + [stain.level for stain in self._stains if stain.at <= run.start]
                run = run._replace(level=approx(max(below, key=rank)) if below else EXACT)
            if not is_exact(run.level):
                lossy = [max([*lossy, run.level], key=rank)]
            self._loaded.append(run)
        self._loaded = _joined(self._loaded)
        self._moved, self._gaps = _without(self._moved, spans), _without(self._gaps, spans)

    def stain(self, at: int, reach: int, level: str) -> None:
        """The states at ``at`` were loaded at ``level``; they hold tokens as far back as ``reach`` positions."""
        if not is_exact(level):
            self._stains.append(_Stain(at, max(at - reach, 1), level))

    def crop(self, n: int) -> None:
        """The context ends at position ``n``."""
        self._loaded, self._moved, self._gaps = (
            [run._replace(end=min(run.end, n)) for run in runs if run.start < n]
            for runs in (self._loaded, self._moved, self._gaps)
        )
        self._stains = [stain._replace(at=min(stain.at, n)) for stain in self._stains if stain.least <= n]

    def below(self, at: int) -> str:
        """The level of what is computed at position ``at``: ``exact`` or ``approx~WORST``."""
        levels = [run.level for run in self._loaded if run.start < at and not is_exact(run.level)]
        levels += [stain.level for stain in self._stains if stain.at <= at]
        return approx(max(levels, key=rank)) if levels else EXACT

    def runs(self, n: int) -> tuple[Run, ...]:
        """Runs that cover positions 0 to ``n``, in order."""
        found: list[Run] = []
        at = 0
        for loaded in [*self._loaded, Run(n, n, EXACT)]:
            if at < loaded.start:
                found += self._computed(at, loaded.start)
            if loaded.end > loaded.start:
                found.append(loaded)
            at = loaded.end
        return tuple(_joined(found))

    def _computed(self, start: int, end: int) -> list[Run]:
        # A crop may have left a stain inside: what was computed before it was computed on something better.
        cuts = sorted({start, end, *(stain.at for stain in self._stains if start < stain.at < end)})
        return [Run(a, b, self.below(a)) for a, b in pairwise(cuts)]

    def worst(self, start: int, end: int) -> str:
        """The level at which positions ``start`` to ``end`` may be given away as numbers: ``exact`` or ``approx~…``."""
        levels = [run.level for run in self.runs(end) if run.start < end and run.end > start]
        lossy = [level for level in levels if not is_exact(level)]
        return approx(max(lossy, key=rank)) if lossy else EXACT
