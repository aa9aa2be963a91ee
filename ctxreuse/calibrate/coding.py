"""Tables, shifts and active components of every level, counted on calibration text; and what coding a text costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.calibrate.tables import Choice, cluster, fold
from ctxreuse.codec.profile import Coding

__all__ = ["Plan", "Planned", "make_plan", "quantised"]

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.float64]

#: Counts are kept for values up to this; beyond it everything is escaped at every shift worth having.
_WIDTH = 15 << 6
_SHIFTS = 7
_TABLES, _REFINING = 56, 8


class Planned(NamedTuple):
    """A level to be coded: ``base`` is the number of the level that it refines, or None.

    ``active``: components of each group, none of those that another family of levels codes.
    """

    name: str
    step: float
    active: tuple[int, ...]
    base: int | None = None


class Plan(NamedTuple):
    """What all levels share and hold: uint8 [tables, 32], and a Coding for each level and group."""

    tables: npt.NDArray[np.uint8]
    codings: tuple[tuple[Coding, ...], ...]


def quantised(y: Floats, levels: Sequence[Planned]) -> list[npt.NDArray[np.int64]]:
    """Whole numbers of components y [rows, n] at each level; a base's follow from those of its refinement."""
    found: list[npt.NDArray[np.int64]] = []
    for number, level in enumerate(levels):
        finer = next((other.step for other in levels if other.base == number), None)
        step = np.float32(level.step) / np.float32(3) if finer is not None else np.float32(level.step)
        q = np.rint(y / step).astype(np.int64)
        found.append((q + 1) // 3 if finer is not None else q)
    return found


def make_plan(
    groups: int, components: Callable[[int], Floats], levels: Sequence[Planned], progress: Callable[[int], None]
) -> Plan:
    """Count the values of each group's components (y [rows, C] of calibration text) and find tables for all."""
    whole: list[list[Counts]] = [[] for _ in levels]
    refined: list[list[Counts]] = [[] for _ in levels]
    for group in range(groups):
        progress(group)
        own = max(level.active[group] for level in levels)
        values = quantised(components(group)[:, :own], levels)
        for number, level in enumerate(levels):
            q = values[number][:, : level.active[group]]
            counts = _count(q, _WIDTH)
            whole[number].append(np.array([fold(counts, k) for k in range(_SHIFTS)]))
            if level.base is not None:
                n = levels[level.base].active[group]
                base = values[level.base][:, :n]
                refined[number].append(_count((q[:, :n] - 3 * base) * np.where(base < 0, -1, 1), 1))
    main = cluster(np.concatenate([counts for part in whole for counts in part], 1), _TABLES, escapes=True)
    thirds = np.concatenate([np.empty((0, 3)), *(counts for part in refined for counts in part)])
    thirds = np.pad(thirds, ((0, 0), (0, 29)))
    fine = cluster(thirds[None], _REFINING, escapes=False)
    tables = np.concatenate([main.tables, fine.tables])
    fine = fine._replace(table=fine.table + np.uint8(len(main.tables)))
    return Plan(tables, _deal(levels, groups, main, fine))


def _count(q: npt.NDArray[np.int64], width: int) -> Counts:
    """How often each value -width … width occurs in each column, [columns, 2 width + 1]; others count as the ends."""
    columns, size = q.shape[1], 2 * width + 1
    at = np.clip(q, -width, width) + width + size * np.arange(columns)
    return np.bincount(at.reshape(-1), minlength=size * columns).reshape(columns, size).astype(np.float64)


def _deal(levels: Sequence[Planned], groups: int, main: Choice, fine: Choice) -> tuple[tuple[Coding, ...], ...]:
    """The choices, which stand one after the other, back to levels and groups."""
    codings, at, refining = [], 0, 0
    for level in levels:
        row = []
        for group in range(groups):
            n = level.active[group]
            base = 0 if level.base is None else levels[level.base].active[group]
            refine = fine.table[refining : refining + base]
            row.append(Coding(main.table[at : at + n], main.shift[at : at + n], refine))
            at, refining = at + n, refining + base
        codings.append(tuple(row))
    return tuple(codings)
