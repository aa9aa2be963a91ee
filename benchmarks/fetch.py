"""Time to first token of a 2,048-token context that a cloud holds, over links of 20 Mbit/s to 1 Gbit/s.

Three processes and real sockets: a cloud (`BusServer` over a `StoreService`, which computes nothing), the link (a relay
with a token bucket and a delay), and the edge, which is this process: a `Runtime` without anything stored, its model of
cost calibrated, that asks for 2,048 tokens and a 32-token question. The link has carried two blocks of another context
before, so its estimates are warm; ``first_contact`` is without that. In ``falling_link`` the rate drops to 2 Mbit/s
0.3 s after the request. Ways take turns, medians of rounds; nothing that was fetched is kept between them.

- **baseline**: the edge computes everything.
- **peer**: a blocking fetch, as stores of KV do it: all blocks, then load, then compute the question. Measured where
  its bytes take less than `PATIENT` seconds.
- **bound**: max(bytes / bandwidth + RTT, computing the question with the context in memory).

``both`` in the notes is what the two resources allow together: the context split so that the link brings its end while
the engine computes its front, both without any other cost, and then the question. It is below the bound on slow links.

The bar of a cell is 1.05 of the baseline, and 1.3 of the bound too where fetching was chosen. Cloud and relay take a
part of this machine's cores (``beside``, of one core while the edge waits), which in a deployment they do not.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.shaped import FALLEN, FALLS_AFTER, Cell, Edge, Row
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.identity.keys import Tokens

if TYPE_CHECKING:
    from ctxreuse.engines.torch_hf import TorchEngine

__all__ = ["RATES", "an_edge", "figures", "run"]

_CONTEXT, _QUESTION, _MODEL = 2048, 32, "smollm2"
RATES, _TRIPS = (20, 50, 200, 1000), (0.002, 0.040)
_SLOWER, _OVER = 1.05, 1.3


def _cell(edge: Edge, row: Row, dtype: str) -> Figure:
    bar = _SLOWER * statistics.median(row.computed)
    bound, both = edge.bound(row.cell), edge.both(row.cell)
    return Figure(
        metric=f"fetch_{row.cell.name}_{dtype}",
        value=row.seconds,
        unit="s",
        baseline=statistics.median(row.computed),
        peer=statistics.median(row.blocking) if row.blocking else None,
        bound=bound,
        better="lower",
        bar=min(bar, _OVER * bound) if row.fetches else bar,
        note=f"{row.note()}, both {both:.3g} s",
    )


def _extra(metric: str, row: Row, note: str, bar: float | None) -> Figure:
    computed = statistics.median(row.computed)
    return Figure(
        metric=metric,
        value=row.seconds,
        unit="s",
        baseline=computed,
        better="lower",
        bar=bar * computed if bar else None,
        note=f"{note}: {row.note()}",
    )


def figures(edge: Edge, dtype: str, options: Options, *, rates: Sequence[int], rounds: int) -> list[Figure]:
    """All figures of one engine over links of ``rates`` Mbit/s."""
    trips = options.pick(_TRIPS[1:], _TRIPS)
    rows: list[Row] = []
    for rate in rates:
        options.step(f"{dtype}: {rate} Mbit/s")
        rows += edge.cells(rate, trips, rounds)
    found = [_cell(edge, row, dtype) for row in rows]
    if dtype == "bf16":
        options.step(f"{dtype}: first contact, falling link")
        cell = Cell(200, 0.040)
        first = edge.first_contact(cell, options.pick(1, rounds))
        found.append(_extra(f"first_contact_{cell.name}_{dtype}", first, "nothing known of the link", _SLOWER))
        for rate in (200, 1000):
            row = edge.falling(Cell(rate, 0.040))
            note = f"{rate} to {FALLEN} Mbit/s after {FALLS_AFTER} s, once"
            found.append(_extra(f"falling_link_{row.cell.name}_{dtype}", row, note, None))
    over = [row.seconds / edge.bound(row.cell) for row in rows if row.fetches]
    both = max((row.seconds / edge.both(row.cell) for row in rows if row.fetches), default=0.0)
    found += [
        Figure(
            metric=f"against_recompute_{dtype}",
            value=max(row.slower for row in rows),
            unit="x",
            better="lower",
            bar=_SLOWER,
            note="the worst cell, by pairs",
        ),
        Figure(
            metric=f"over_the_bound_{dtype}",
            value=max(over, default=0.0),
            unit="x",
            better="lower",
            bar=_OVER,
            note=f"the worst cell where fetching was chosen; over both resources at once {both:.3g} x",
        ),
        Figure(
            metric=f"same_token_{dtype}",
            value=statistics.mean(edge.same),
            unit="share",
            bar=1.0,
            note="first tokens equal to those of recomputing",
        ),
        Figure(
            metric=f"logits_differ_{dtype}",
            value=max(edge.differs),
            unit="share",
            better="lower",
            bar=1e-4 if dtype == "f32" else None,
            note="largest difference to recomputing, of the largest logit",
        ),
    ]
    return found


def _prompt(engine: TorchEngine) -> Tokens:
    """English prose of the standard library, so that the first token is not decided by a hair."""
    from pydoc_data.topics import topics

    text = engine.text
    assert text is not None
    return text.encode("\n".join(topics[name] for name in sorted(topics)))[: _CONTEXT + _QUESTION]


@contextmanager
def an_edge(dtype: str, options: Options) -> Iterator[Edge]:
    """An edge whose cloud holds the context, in a numeric type; both end with the block."""
    from ctxreuse.engines.torch_hf import TorchEngine

    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as folder:
        options.step(f"{dtype}: computing the context for the cloud")
        engine = TorchEngine.open(_MODEL, dtype=dtype, reserve=_CONTEXT + _QUESTION + 64)
        edge = Edge(engine, _prompt(engine), _QUESTION, Path(folder))
        try:
            yield edge
        finally:
            edge.close()


def run(options: Options) -> list[Figure]:
    """Medians of three rounds; ``quick``: bfloat16, three rates, one round trip."""
    found: list[Figure] = []
    for dtype, short in options.pick((("bfloat16", "bf16"),), (("float32", "f32"), ("bfloat16", "bf16"))):
        with an_edge(dtype, options) as edge:
            found += figures(edge, short, options, rates=options.pick((20, 200, 1000), RATES), rounds=3)
    return found
