"""Tokens served by the store's eviction policies over a trace, beside LRU and Belady (simulation).

Without ``--text`` generated traffic; with it a recording of one's own (``ctxreuse-edge serve --record
FILE``), or any trace that ``ctxreuse replay`` reads. The cache is 1/16 of what the trace needs in all, and the first
half of the requests only fills it. ``ctxreuse replay`` answers more: other capacities, prices, plots.
"""

from __future__ import annotations

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.lab import Trace, open_trace
from ctxreuse.lab.generate import KINDS, generate
from ctxreuse.lab.packed import pack
from ctxreuse.lab.study import Study
from ctxreuse.store.policy import NAMES

__all__ = ["OPTIONS", "run"]

OPTIONS = ("texts",)
_NOTE = "second half of the requests; baseline: LRU; peer: the best other policy; bound: Belady; infinite cache {:.1f}"


def run(options: Options) -> list[Figure]:
    """Percent of prompt tokens served; no bar holds for traffic of one's own."""
    traces = [open_trace(path) for path in options.texts] or [
        generate(kind, requests=options.pick(300, 4_000)) for kind in KINDS
    ]
    return [figure for trace in traces for figure in _figures(trace, options)]


def _figures(trace: Trace, options: Options) -> list[Figure]:
    packed = pack(trace)
    study = Study(packed, block_bytes=packed.block_tokens, window=(len(packed) // 2, len(packed)))
    capacity = max(packed.blocks // 16, 1) * packed.block_tokens

    def progress(name: str, _: int, done: int) -> None:
        options.step(f"{packed.name}: {name}", done, len(NAMES) * len(packed))

    share = {found.policy: 100 * found.token_hit for found in study.run(NAMES, [capacity], progress)}
    return [
        Figure(
            metric=f"{packed.name} {name}",
            value=share[name],
            unit="% of tokens",
            baseline=share["lru"],
            peer=max(share[other] for other in NAMES if other != name),
            bound=share["belady"],
            note="" if number else _NOTE.format(share["infinite"]),
        )
        for number, name in enumerate(sorted(NAMES, key=lambda name: name != "adaptive"))
    ]
