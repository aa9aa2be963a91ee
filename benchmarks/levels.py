"""Time to first token over links of 20 Mbit/s to 1 Gbit/s when blocks may be encoded, at each level and as picked.

The context, links and processes of ``bench fetch``, in bfloat16. Exact blocks raw, packed, each lossy level of the
model's card that stands alone, and ``adaptive``: all of them are allowed and the two ends pick. The cloud keeps nothing
of what it encoded, so each fetch pays for its encoding. Without a card (``ctxreuse calibrate``) only the exact levels
are measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.fetch import RATES, an_edge
from benchmarks.shaped import Cell, Edge
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.block.levels import EXACT, PACKED, expected_kl, family
from ctxreuse.codec import Codec

__all__ = ["level_figures", "run"]

_RTT = 0.040
_NEAR, _LESS = 1.05, 3.0


class _Way(NamedTuple):
    """One way to allow levels: ``max_kl`` of its requests, ``only`` the one level that is offered ("": all)."""

    name: str
    max_kl: float | None
    only: str = ""


class _Taken(NamedTuple):
    seconds: float
    nbytes: int
    levels: Mapping[str, int]
    same: bool


def level_figures(edge: Edge, dtype: str, options: Options, *, rates: Sequence[int], rounds: int) -> list[Figure]:
    """Seconds at each level over links of ``rates`` Mbit/s, and how far adaptive is from the best of them."""
    codec = Codec.open(edge.engine.space)
    lossy = [info.name for info in codec.levels if info.lossy and not info.base]
    worst = max(map(expected_kl, lossy), default=None)
    ways = [_Way(EXACT, None, EXACT), _Way(PACKED, None, PACKED)]
    ways += [_Way(name, worst, name) for name in lossy]
    ways.append(_Way("adaptive", worst))
    found: list[Figure] = []
    for rate in rates:
        options.step(f"{dtype}: levels over {rate} Mbit/s")
        found += _at(edge, dtype, Cell(rate, _RTT), ways, rounds, slowest=rate == min(rates))
    return found


def _at(edge: Edge, dtype: str, cell: Cell, ways: Sequence[_Way], rounds: int, *, slowest: bool) -> list[Figure]:
    taken: dict[str, list[_Taken]] = {way.name: [] for way in ways}
    computed: list[float] = []
    with edge.link(cell, levels=True) as link:
        for way in ways:  # decoding and encoding at each level once, so that both sides know what it takes
            edge.at_level(link, way.max_kl, way.only)
        for turn in range(rounds):
            computed.append(edge.recompute())
            for way in ways[:: -1 if turn % 2 else 1]:
                answer, usage = edge.at_level(link, way.max_kl, way.only)
                taken[way.name].append(_Taken(answer.seconds, answer.nbytes, usage.tokens.by_level, answer.same))
        plain = edge.blocking(link) if slowest else None
    seconds = {name: statistics.median(one.seconds for one in all_) for name, all_ in taken.items()}
    recompute = statistics.median(computed)
    figures = [
        Figure(
            metric=f"level_{name}_{cell.name}_{dtype}",
            value=seconds[name],
            unit="s",
            baseline=recompute,
            better="lower",
            note=_note(taken[name]),
        )
        for name in seconds
    ]
    best = min((name for name in seconds if name != "adaptive"), key=seconds.__getitem__)
    figures.append(
        Figure(
            metric=f"adaptive_over_best_level_{cell.name}_{dtype}",
            value=statistics.median(
                ours.seconds / theirs.seconds for ours, theirs in zip(taken["adaptive"], taken[best])
            ),
            unit="x",
            better="lower",
            bar=_NEAR,
            note=f"by pairs with {best}",
        )
    )
    if plain is not None and len(seconds) > 3:
        ours = seconds["adaptive"]
        figures += [
            Figure(
                metric=f"exact_over_adaptive_{cell.name}_{dtype}",
                value=plain / ours,
                unit="x",
                bar=_LESS,
                note=f"a blocking fetch of exact blocks takes {plain:.3g} s, once",
            ),
            Figure(
                metric=f"best_exact_over_adaptive_{cell.name}_{dtype}",
                value=min(plain, recompute, seconds[EXACT], seconds[PACKED]) / ours,
                unit="x",
                note=f"the best of that, recomputing ({recompute:.3g} s) and both ends at once with exact blocks",
            ),
        ]
    return figures


def _note(taken: Sequence[_Taken]) -> str:
    levels = sorted({family(level) for one in taken for level, tokens in one.levels.items() if tokens}, key=expected_kl)
    same = sum(one.same for one in taken)
    size = statistics.median(one.nbytes for one in taken) / 1e6
    return f"{size:.3g} MB, reused at {' and '.join(levels) or 'none'}, first token equal in {same} of {len(taken)}"


def run(options: Options) -> list[Figure]:
    """Medians of three rounds; ``quick``: one round, two rates."""
    with an_edge("bfloat16", options) as edge:
        rates, rounds = options.pick(((20, 200), 1), (RATES, 3))
        return level_figures(edge, "bf16", options, rates=rates, rounds=rounds)
