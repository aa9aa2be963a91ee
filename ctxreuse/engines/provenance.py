"""How the K and V of a context came to be: which tokens were loaded at which level, and what was computed on top."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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


def _parts(run: Run, start: int, end: int) -> list[Run]:
    """What is left of a run outside ``start`` to ``end``."""
    sides = (run._replace(end=min(run.end, start)), run._replace(start=max(run.start, end)))
    return [side for side in sides if side.start < side.end]


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Ascending runs, neighbours of one level as one."""
    found: list[Run] = []
    for run in runs:
        if found and (found[-1].end, found[-1].level) == (run.start, run.level):
            found[-1] = found[-1]._replace(end=run.end)
        else:
            found.append(run)
    return found


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending spans, neighbours as one."""
    return [(run.start, run.end) for run in _joined([Run(a, b, "") for a, b in spans])]


def _without(spans: Sequence[tuple[int, int]], gone: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending spans less other ascending spans."""
    left = [Run(a, b, "") for a, b in spans]
    for a, b in gone:
        left = [part for run in left for part in _parts(run, a, b)]
    return [(run.start, run.end) for run in left]


class Provenance:
    """The history of one context. Not thread-safe: its context's owner calls."""

    def __init__(self) -> None:
        self._loaded: list[Run] = []
        self._stains: list[_Stain] = []
        self._moved: list[tuple[int, int]] = []
        self._gaps: list[tuple[int, int]] = []

    @property
    def moved(self) -> tuple[tuple[int, int], ...]:
        """Spans that were moved to where they are and have not been computed since."""
        return tuple(self._moved)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Spans that hold nothing yet."""
        return tuple(self._gaps)

    def load(self, start: int, size: int, levels: Sequence[str]) -> None:
        """Blocks of ``size`` tokens each were appended from position ``start`` on."""
        for i, level in enumerate(levels):
            at = start + i * size
            last = self._loaded[-1] if self._loaded else None
            if last is not None and (last.end, last.level) == (at, level):
                self._loaded[-1] = last._replace(end=at + size)
            else:
                self._loaded.append(Run(at, at + size, level))

    def place(self, start: int, end: int, spans: Sequence[tuple[int, int]], level: str) -> None:
        """Tokens ``start`` to ``end`` were appended: ``spans`` (ascending) moved there, the others gaps."""
        self._loaded = _joined([*self._loaded, *(Run(a, b, level) for a, b in spans)])
        self._moved = _merged([*self._moved, *spans])
        self._gaps = _merged([*self._gaps, *_without([(start, end)], spans)])

    def compute(self, spans: Sequence[tuple[int, int]], n: int) -> None:
        """The rows in ``spans`` (ascending) of a context of ``n`` tokens were computed, in order, on what is held."""
        # What stands on rows that are better now was computed on what they were before: its level is written down.
        fixed = [run for run in self.runs(n) if run.level != EXACT]
        for a, b in spans:
            self._loaded = [part for run in fixed for part in _parts(run, a, b)]
            level = self.below(a)
            fixed = sorted([*self._loaded, *([] if level == EXACT else [Run(a, b, level)])])
        self._loaded = _joined(fixed)
        self._moved = _without(self._moved, spans)
        self._gaps = _without(self._gaps, spans)

    def stain(self, at: int, reach: int, level: str) -> None:
        """The states at ``at`` were loaded at ``level``; they hold tokens as far back as ``reach`` positions."""
        if not is_exact(level):
            self._stains.append(_Stain(at, max(at - reach, 1), level))

    def crop(self, n: int) -> None:
        """The context ends at position ``n``."""
        self._loaded = [run._replace(end=min(run.end, n)) for run in self._loaded if run.start < n]
        self._stains = [stain._replace(at=min(stain.at, n)) for stain in self._stains if stain.least <= n]
        self._moved = [(a, min(b, n)) for a, b in self._moved if a < n]
        self._gaps = [(a, min(b, n)) for a, b in self._gaps if a < n]

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
        return tuple(found)

    def _computed(self, start: int, end: int) -> list[Run]:
        # A crop may have left a stain inside: what was computed before it was computed on something better.
        cuts = sorted({start, end, *(stain.at for stain in self._stains if start < stain.at < end)})
        return [Run(a, b, self.below(a)) for a, b in pairwise(cuts)]

    def worst(self, start: int, end: int) -> str:
        """The level at which positions ``start`` to ``end`` may be given away as numbers: ``exact`` or ``approx~…``."""
        levels = [run.level for run in self.runs(end) if run.start < end and run.end > start]
        lossy = [level for level in levels if not is_exact(level)]
        return approx(max(lossy, key=rank)) if lossy else EXACT
