"""Passes formed anew at an early exit: what a split into two stages gains where many tokens leave after the first.

The seconds of both stages (SmolLM2's layers up to 20 of 30, and the others with the head) are measured: processor time
of one thread, for a token of each of 1 to 32 contexts. The rest is a simulation: tokens arrive at random, some leave
after the first stage, all are to be done within a deadline, and one processor runs one stage at a time. Three ways:
whole passes, of which those that leave have their token earlier and the pass its length; split ones, whose second stage
has fewer rows; split ones that are refilled, where those that stay wait behind the first stage until there is a full
batch of them, or the deadline of one leaves no more time. A figure is the highest rate at which 99 % are in time,
against that of whole passes; peer: split without refilling; bound: the stages' seconds by the share that reaches them.

The last figure is a pass from which half the rows leave. What they skip is computed later, as rows of other passes: so
a pass from which only some leave saves nothing, and the engine lets its tokens leave together or not at all. Refilling
needs more tokens waiting than a pass takes; a scheduler whose passes take 32 contexts seldom has them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.engines.torch_hf import TorchEngine

__all__ = ["Stages", "best_rate", "run"]

#: Rows of a batch, the share of tokens that leave after the first stage: SmolLM2's at 1 % wrong ones, and more.
_BATCH, _LEAVE = 8, (0.09, 0.5, 0.8)
#: The deadline, in whole passes of a full batch; the share that must be in time; tokens of a simulation.
_DEADLINE, _IN_TIME, _TOKENS = 6.0, 0.99, 20_000
_DEPTH, _PROMPT, _ROWS = 20, 64, (1, 2, 4, 8, 16, 32)


class Stages(NamedTuple):
    """Seconds of both stages by rows: 1, 2, … of ``rows``."""

    rows: Sequence[int]
    first: Sequence[float]
    second: Sequence[float]

    def seconds(self, stage: int, rows: int) -> float:
        """Return what a stage takes of so many rows; none take no time."""
        return float(np.interp(rows, self.rows, self.second if stage else self.first)) if rows else 0.0


def run(options: Options) -> list[Figure]:
    """Measure the stages, and simulate."""
    stages = _measured(options)
    figures = []
    for leave in _LEAVE:
        found = dict[str, float]()
        for way in ("whole", "split", "refilled"):
            options.step(f"{leave:.0%} leave: {way}")
            found[way] = best_rate(stages, way, leave, options.pick(2000, _TOKENS))
        first, second = (stages.seconds(stage, _BATCH) for stage in (0, 1))
        bound = (first + second) / (first + (1 - leave) * second)
        figures.append(
            Figure(
                metric=f"simulated rate in time, {leave:.0%} leave",
                value=found["refilled"] / found["whole"],
                unit="x",
                baseline=1.0,
                peer=found["split"] / found["whole"],
                bound=bound,
                bar=None if options.quick else 0.9 * bound,
                note=", ".join(f"{way}: {rate:.1f} tokens/s" for way, rate in found.items()),
            )
        )
    whole = stages.seconds(0, _BATCH) + stages.seconds(1, _BATCH)
    half = stages.seconds(0, _BATCH) + stages.seconds(1, _BATCH // 2)
    figures.append(
        Figure(
            metric=f"processor time of a pass of {_BATCH} of which half leave", value=1e3 * half, unit="ms",
            baseline=1e3 * whole, bound=1e3 * stages.seconds(0, _BATCH), better="lower",
            note="baseline: none leave; bound: all leave",
        )
    )  # fmt: skip
    return figures


def best_rate(stages: Stages, way: str, leave: float, tokens: int) -> float:
    """Return the highest rate, tokens a second, at which as many as must be are in time."""
    most = _BATCH / stages.seconds(0, _BATCH)  # no way is faster: all leave
    low, high = 0.0, most
    for _ in range(12):
        rate = (low + high) / 2
        if _in_time(stages, way, leave, rate, tokens) >= _IN_TIME:
            low = rate
        else:
            high = rate
    return low


def _in_time(stages: Stages, way: str, leave: float, rate: float, tokens: int) -> float:
    """Return the share of tokens that are done within their deadline."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / rate, tokens)).tolist()
    leaves = (rng.random(tokens) < leave).tolist()
    whole = stages.seconds(0, _BATCH) + stages.seconds(1, _BATCH)
    limit, now, at, good = _DEADLINE * whole, 0.0, 0, 0
    fronts, backs = deque[int](), deque[int]()  # tokens that wait for each stage

    def done(ones: Sequence[int]) -> int:
        return sum(now <= arrivals[one] + limit for one in ones)

    while at < tokens or fronts or backs:
        while at < tokens and arrivals[at] <= now:
            fronts.append(at)
            at += 1
        # The last moments at which a stage may begin for the one that waits longest, if one of the other comes between.
        begin = [
            arrivals[queue[0]] + limit - 2 * whole if queue else float("inf") for queue in (fronts, backs)
        ]  # fmt: skip
        begin[1] += stages.seconds(0, _BATCH)
        full = [len(queue) >= _BATCH or (at == tokens and len(queue) > 0) for queue in (fronts, backs)]
        if full[1] or begin[1] <= now:
            ones = [backs.popleft() for _ in range(min(len(backs), _BATCH))]
            now += stages.seconds(1, len(ones))
            good += done(ones)
        elif full[0] or begin[0] <= now:
            ones = [fronts.popleft() for _ in range(min(len(fronts), _BATCH))]
            now += stages.seconds(0, len(ones))
            good += done([one for one in ones if leaves[one]])
            stay = [one for one in ones if not leaves[one]]
            if way == "refilled":
                backs += stay
            else:
                now += stages.seconds(1, len(stay) if way == "split" else len(ones))
                good += done(stay)
        else:
            now = min(arrivals[at] if at < tokens else float("inf"), *begin)
    return good / tokens


def _measured(options: Options) -> Stages:
    """Processor time of both stages, of a token of each of so many contexts."""
    import torch

    from ctxreuse.engines.torch_hf.exits import LayerParts
    from ctxreuse.engines.torch_hf.modes import inference
    from ctxreuse.engines.torch_hf.packed import packed_cache, packing

    engine = TorchEngine.open("smollm2", threads=1)
    parts, times = LayerParts(engine.model), ([], [])  # type: ignore[var-annotated]
    ids = np.arange(5, 5 + _PROMPT, dtype="<i4")

    @inference
    def one(rows: int) -> tuple[float, float]:
        contexts = [engine.new_context(_PROMPT + 16) for _ in range(rows)]
        for context in contexts:
            engine.prefill(context, ids)
        cache, counts = packed_cache([context.cache for context in contexts], [1] * rows), list[list[float]]()
        for _ in range(options.pick(2, 6)):
            given, positions = torch.full((rows,), 7), torch.full((rows,), _PROMPT)
            with packing():
                began = time.process_time()
                hidden = parts.run(given, positions, cache, 0, _DEPTH)
                middle = time.process_time()
                parts.logits(parts.run(hidden, positions, cache, _DEPTH, parts.count))
                counts.append([middle - began, time.process_time() - middle])
        first, second = np.median(counts[1:], 0)
        return float(first), float(second)

    for rows in _ROWS:
        options.step(f"{rows} contexts")
        for all_, seconds in zip(times, one(rows)):
            all_.append(seconds)
    return Stages(_ROWS, *times)
