"""Passes formed anew at an early exit: what a split into two stages gains where many tokens leave after the first.

The seconds of both stages (SmolLM2's layers up to 20 of 30, and the others with the head) are measured: processor time
of one thread, for a token of each of 1 to 32 contexts. The rest is a simulation: tokens arrive at random, some leave
after the first stage, all are to be done within a deadline, and one processor runs one stage at a time. Three ways:
whole passes, of which those that leave have their token earlier and the pass its length; split ones, whose second stage
has fewer rows; split ones that are refilled, where those that stay wait behind the first stage until there is a full
batch of them, or the deadline of one leaves no more time. A figure is the highest rate at which 99 % are in time,
against that of whole passes; peer: split without refilling; bound: the stages' seconds by the share that reaches them.

That is a service whose requests are done when they leave. Answers are not: each token waits for the one before, and
what it skipped is computed later, as a row of the pass in which its context goes on. So a pass from which only some
leave saves no rows, only readings of weights, and the engine lets its tokens leave together or not at all. The last
figures are of answers that go on so, all the time, eight or 32 at once, against passes that none leaves, ramps for
nothing; peer: they leave together; bound: the second stage's weights are not read for those that left. Refilled
stages have the sizes of batches that are best in hindsight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.engines.torch_hf import TorchEngine

__all__ = ["Stages", "answer_rate", "best_rate", "run"]

#: Rows of a batch, the share of tokens that leave after the first stage: SmolLM2's at 1 % wrong ones, and more.
_BATCH, _LEAVE = 8, (0.09, 0.5, 0.8)
#: The deadline, in whole passes of a full batch; the share that must be in time; tokens of a simulation.
_DEADLINE, _IN_TIME, _TOKENS = 6.0, 0.99, 20_000
_DEPTH, _PROMPT, _ROWS = 20, 64, (1, 2, 4, 8, 16, 32)
#: Of answers that go on: how many at once, and the shares that leave within budgets of 1, 2 and 5 %, see `exits`.
_ANSWERS, _LEAVE_WITHIN = (8, 32), (0.14, 0.22, 0.34)
#: Tokens of an answer that may wait for their second stage.
_PENDING = 8


class Stages(NamedTuple):
    """Seconds of both stages by rows: 1, 2, … of ``rows``."""

    rows: Sequence[int]
    first: Sequence[float]
    second: Sequence[float]

    def seconds(self, stage: int, rows: int) -> float:
        """Return what a stage takes of so many rows; none take no time, and beyond the last each as much as before."""
        times = self.second if stage else self.first
        more = (times[-1] - times[-2]) / (self.rows[-1] - self.rows[-2]) * max(rows - self.rows[-1], 0)
        return float(np.interp(rows, self.rows, times)) + more if rows else 0.0


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
    for answers, leave in product(_ANSWERS, _LEAVE_WITHIN):
        options.step(f"{answers} answers, {leave:.0%} leave")
        figures.append(_answers(stages, answers, leave, options.pick(1000, _TOKENS)))
    return figures


def _answers(stages: Stages, answers: int, leave: float, tokens: int) -> Figure:
    sizes = sorted({1, answers // 4, answers // 2, 3 * answers // 4, answers})
    whole = answers / sum(stages.seconds(stage, answers) for stage in (0, 1))
    best = max((answer_rate(stages, answers, leave, tokens, *each), each) for each in product(sizes, sizes))
    rows = [stages.seconds(0, answers), stages.seconds(1, answers)]
    bound = answers / (rows[0] + rows[1] - leave * stages.seconds(1, 1))
    together = answer_rate(stages, answers, leave, tokens, answers, 0)
    return Figure(
        metric=f"tokens a second of {answers} answers at once, {leave:.0%} leave",
        value=best[0] / whole,
        unit="x",
        baseline=1.0,
        peer=together / whole,
        bound=bound / whole,
        note=f"none leave: {whole:.1f} tokens/s; refilled in batches of {best[1][0]} and {best[1][1]}",
    )


def answer_rate(stages: Stages, answers: int, leave: float, tokens: int, first: int, second: int) -> float:
    """Return the tokens a second of ``answers`` that go on all the time.

    Args:
        stages: what the stages take.
        answers: how many there are.
        leave: the share of tokens that are sure enough at the ramp.
        tokens: of all answers, in the simulation.
        first: answers from which on the first stage runs, if others wait for the second.
        second: answers from which on the second stage does; 0: those of a pass leave together or not at all.
    """
    rng, now, done = np.random.default_rng(0), 0.0, 0
    fronts, backs, pending = list(range(answers)), list[int](), [0] * answers
    while done < tokens:
        if backs and (len(backs) >= max(second, 1) or len(fronts) < max(first, 1)):
            now += stages.seconds(1, sum(1 + pending[one] for one in backs))
            for one in backs:
                pending[one] = 0
            done += len(backs)
            fronts, backs = fronts + backs, []
            continue
        now += stages.seconds(0, len(fronts))
        sure = [bool(rng.random() < leave) and pending[one] < _PENDING for one in fronts]
        if not second and not all(sure):
            sure = [False] * len(fronts)
        for one, leaves in zip(fronts, sure):
            pending[one] += leaves
        done += sum(sure)
        backs += [one for one, leaves in zip(fronts, sure) if not leaves]
        fronts = [one for one, leaves in zip(fronts, sure) if leaves]
    return done / now


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
