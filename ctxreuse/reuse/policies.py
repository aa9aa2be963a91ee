"""Which rows of moved runs are computed anew: the published repairs and their combinations behind one interface."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import ConfigError
from ctxreuse.keys import Tokens
from ctxreuse.units import parse_duration

if TYPE_CHECKING:
    from ctxreuse.cost import PrefillLine

__all__ = ["Deviations", "Repair", "Role", "Span", "budget_tokens", "parse"]

Role: TypeAlias = Literal["k", "v"]

#: ``deviations(positions int32 [n], layer, role)``: float32 [n], how far K or V that were computed afresh up to
#: ``layer`` lie from those that are held: squared distance, summed over heads and dims.
Deviations: TypeAlias = Callable[[Tokens, int, Role], npt.NDArray[np.float32]]


class Span(Protocol):
    """A moved run, such as `Run`: positions ``start`` to ``end`` of the prompt."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Repair(Protocol):
    """Chooses rows. Immutable; any thread may call, and equal arguments give equal rows."""

    @property
    def name(self) -> str:
        """As users write it; `parse` gives an equal repair for it."""
        ...

    @property
    def turned(self) -> bool:
        """False only for ``none``: not even the keys are turned to their new positions."""
        ...

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations) -> Tokens:
        """Positions in ``runs`` to compute anew, ascending, int32, at most ``budget`` of them."""
        ...

    def work(self, tokens: int, runs: int, layers: int) -> float:
        """Layer-tokens that it computes over ``runs`` runs of ``tokens`` tokens together in a model of ``layers``
        layers, as a share of computing them all; its looking for rows is part of it."""
        ...


class _Nothing(NamedTuple):
    """Moves rows and computes none of them."""

    name: str = "rotate"

    @property
    def turned(self) -> bool:
        return self.name != "none"

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations) -> Tokens:
        return np.zeros(0, np.int32)

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return 0.0


class _First(NamedTuple):
    """The first ``count`` rows of each run, which were attention sinks where they stood (EPIC, 2025)."""

    count: int  # type: ignore[assignment]  # no tuple is searched here
    turned: bool = True

    @property
    def name(self) -> str:
        return f"first-{self.count}"

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations) -> Tokens:
        # A budget too small for all takes the same number from each run, as the first rows matter most.
        wanted = max(budget, 0)
        found = [np.arange(run.start, min(run.end, run.start + self.count), dtype=np.int32) for run in runs]
        depth = np.concatenate([np.arange(len(one)) for one in found]) if found else np.zeros(0, np.intp)
        rows = np.concatenate(found) if found else np.zeros(0, np.int32)
        chosen: Tokens = np.sort(rows[np.argsort(depth, kind="stable")[:wanted]])
        return chosen

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return min(1.0, self.count * runs / tokens) if tokens else 0.0


class _Last(NamedTuple):
    """The rows nearest to what is said next, which looks there most: ``most`` of them or a ``share`` of all."""

    most: int = 0
    share: float = 0.0
    turned: bool = True

    @property
    def name(self) -> str:
        return f"last-{self.most or _percent(self.share)}"

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations) -> Tokens:
        rows = _positions(runs)
        wanted = self._wanted(len(rows), budget)
        return rows[len(rows) - wanted :]

    def _wanted(self, total: int, budget: int) -> int:
        return max(0, min(self.most, total, budget)) if self.most else _share(self.share, total, budget)

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return self._wanted(tokens, tokens) / tokens if tokens else 0.0


class _Random(NamedTuple):
    """A share of all rows, drawn by ``seed`` and the rows' positions: what the others must beat."""

    share: float
    seed: int
    turned: bool = True

    @property
    def name(self) -> str:
        return f"random-{_percent(self.share)}"

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations) -> Tokens:
        rows = _positions(runs)
        rng = np.random.default_rng([self.seed, len(rows), *rows[:1].tolist()])
        chosen: Tokens = np.sort(rng.permutation(rows)[: _share(self.share, len(rows), budget)])
        return chosen

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return self.share


class _Deviant(NamedTuple):
    """The share of rows that lies farthest from freshly computed ones (CacheBlend, 2025).

    ``steps``: (share, layer), layers ascending and shares falling: what is kept at one layer is compared again at the
    next, where differences that the first layers do not show have grown. ``near``: only so many rows that stand last
    are compared (0: all), and shares are of these: what is said next looks there most.
    """

    role: Role
    steps: tuple[tuple[float, int], ...]
    near: int = 0
    turned: bool = True

    @property
    def name(self) -> str:
        shares = ">".join(_percent(share) for share, _ in self.steps)
        usual = tuple(layer for _, layer in self.steps) == _layers(len(self.steps))
        layers = "" if usual else "@" + ">".join(str(layer) for _, layer in self.steps)
        return f"{self.role}-{shares}{layers}" + (f"/{self.near}" if self.near else "")

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations) -> Tokens:
        return self.beyond(np.zeros(0, np.int32), runs, budget, deviations)

    def beyond(self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations) -> Tokens:
        """As `rows`, but none of ``chosen``, which others have chosen before."""
        rows = _positions(runs)[-self.near :]
        total = len(rows)
        for share, layer in self.steps:
            if not len(rows):
                break
            # All rows are compared, also the chosen: rows behind them attend to how they will be.
            far = np.nan_to_num(deviations(rows, layer, self.role), nan=np.inf).astype(np.float64)
            free = ~np.isin(rows, chosen)
            rows, far = rows[free], far[free]
            rows = np.sort(rows[np.argsort(-far, kind="stable")[: _share(share, total, budget)]])
        return rows

    def work(self, tokens: int, runs: int, layers: int) -> float:
        share, before, looked = 1.0, 0, 0.0
        for kept, layer in self.steps:
            looked += share * (layer - before) / max(layers, 1)
            share, before = kept, layer
        of = min(self.near, tokens) / tokens if self.near and tokens else 1.0
        return min(1.0, of * (looked + share))


class _Both(NamedTuple):
    """One repair after the other: each has what budget those before it left."""

    parts: tuple[_First | _Last | _Random | _Deviant, ...]
    turned: bool = True

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations) -> Tokens:
        chosen: Tokens = np.zeros(0, np.int32)
        for part in self.parts:
            left = max(budget - len(chosen), 0)
            if isinstance(part, _Deviant):
                more = part.beyond(chosen, runs, left, deviations)
            else:
                more = np.setdiff1d(part.rows(runs, budget, deviations), chosen)
                more = more[max(len(more) - left, 0) :] if isinstance(part, _Last) else more[:left]
            chosen = np.union1d(chosen, more).astype(np.int32)
        return chosen

    def work(self, tokens: int, runs: int, layers: int) -> float:
        return min(1.0, sum(part.work(tokens, runs, layers) for part in self.parts))


def _positions(runs: Sequence[Span]) -> Tokens:
    spans = [np.arange(run.start, run.end, dtype=np.int32) for run in runs]
    return np.concatenate(spans) if spans else np.zeros(0, np.int32)


def _share(share: float, total: int, budget: int) -> int:
    return max(0, min(budget, -int(-share * total // 1)))


def _percent(share: float) -> str:
    return f"{share * 100:g}%"


def _layers(steps: int) -> tuple[int, ...]:
    """Check layers where none are named: 1, as published, then 4, 13, …"""
    found = [1]
    while len(found) < steps:
        found.append(3 * found[-1] + 1)
    return tuple(found)


_SHARE = r"\d{1,3}(?:\.\d{1,3})?%"
_DEVIANT = re.compile(
    rf"([kv])-({_SHARE}(?:>{_SHARE}){{0,3}})(?:@(\d{{1,4}}(?:>\d{{1,4}}){{0,3}}))?(?:/(\d{{1,6}}))?", re.ASCII
)
_RANDOM = re.compile(rf"random-({_SHARE})", re.ASCII)
_FIRST = re.compile(r"first-(\d{1,6})", re.ASCII)
_LAST = re.compile(rf"last-(?:(\d{{1,6}})|({_SHARE}))", re.ASCII)


def parse(name: str, *, seed: int = 0) -> Repair:
    """The repair of this name. Raises ConfigError for one that there is not.

    ``none`` (moved as it is), ``rotate`` (keys turned), ``first-8`` (rows of each run), ``last-32`` and ``last-5%`` (of
    all rows those that stand last), ``v-5%`` and ``k-5%`` (the share of all rows that deviates most in V or K at layer
    1), ``v-5%@3`` (at layer 3), ``v-20%/192`` (of the 192 rows that stand last), ``v-15%>8%`` (15 % at layer 1, of
    which 8 % of all at layer 4; ``v-15%>8%@2>6`` names the layers), ``random-15%`` (drawn by ``seed``), and
    combinations such as ``first-4+v-5%``.
    """
    if name in ("none", "rotate"):
        return _Nothing(name)
    parts = tuple(_part(word, seed, name) for word in name.split("+")[:8])
    if name.count("+") >= 8:
        raise _unknown(name)
    return parts[0] if len(parts) == 1 else _Both(parts)


def _part(word: str, seed: int, name: str) -> _First | _Last | _Random | _Deviant:
    if (found := _FIRST.fullmatch(word)) is not None and int(found[1]):
        return _First(int(found[1]))
    if (found := _LAST.fullmatch(word)) is not None and (found[2] or int(found[1])):
        return _Last(share=_fraction(found[2], name)) if found[2] else _Last(int(found[1]))
    if (found := _RANDOM.fullmatch(word)) is not None:
        return _Random(_fraction(found[1], name), seed)
    found = _DEVIANT.fullmatch(word)
    if found is None:
        raise _unknown(name)
    shares = [_fraction(share, name) for share in found[2].split(">")]
    layers = tuple(map(int, found[3].split(">"))) if found[3] else _layers(len(shares))
    falling = all(a > b for a, b in pairwise(shares))
    rising = all(a < b for a, b in pairwise(layers))
    near = int(found[4]) if found[4] else 0
    if len(layers) != len(shares) or not (falling and rising) or (found[4] and not near):
        raise _unknown(name)
    return _Deviant("k" if found[1] == "k" else "v", tuple(zip(shares, layers)), near)


def _fraction(text: str, name: str) -> float:
    share = float(text.removesuffix("%")) / 100
    if not 0 < share <= 1:
        raise _unknown(name)
    return share


def _unknown(name: str) -> ConfigError:
    fix = "Choose none, rotate, first-8, last-5%, v-5%, k-15%@2, v-20%/192, v-15%>8%, random-15% or a sum: first-4+v-5%"
    return ConfigError(f"no such repair: {name[:64]!r}", fix=fix)


def budget_tokens(budget: str, tokens: int, line: PrefillLine | None = None, held: int = 0) -> int:
    """How many of ``tokens`` moved rows a budget pays for: ``10%`` of them, ``64`` of them, or as many as are computed
    in ``200ms``.

    ``line``: what computing takes here; ``held``: tokens that they are computed behind. A budget of time is 0 as long
    as nothing is known of that. Raises ConfigError for what is no budget.
    """
    if budget.endswith("%"):
        if re.fullmatch(_SHARE, budget, re.ASCII) is None:
            raise _no_budget(budget)
        return min(tokens, _share(float(budget[:-1]) / 100, tokens, tokens))
    if budget.isascii() and budget.isdigit() and len(budget) < 12:
        return min(tokens, int(budget))
    try:
        seconds = parse_duration(budget)
    except ConfigError:
        raise _no_budget(budget) from None
    low, high = 0, tokens  # the most that take no longer, by halving
    while low < high:
        middle = (low + high + 1) // 2
        takes = line.seconds(middle, held) if line is not None else None
        if takes is not None and takes <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


def _no_budget(budget: str) -> ConfigError:
    return ConfigError(f"{budget[:32]!r} is no budget", fix="Write a share, tokens or a time: 10%, 64 or 200ms")
