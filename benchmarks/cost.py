"""Predicted against real seconds: prefills of many lengths, loads from disk, fetches over links of many speeds.

The model of cost learns from the first half of each kind and is asked for the second half, which it has not seen. Every
figure is the relative error of a prediction made before the work. Fetches come from a peer in the same process at the
pace of a link that is simulated: what is measured is the prediction, not a network. The baseline is one number of
seconds a token, fitted to the same first half.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.nearby import Held, NearbyRemote, constant
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.cost import CostModel
from ctxreuse.engines import Engine, open_engine
from ctxreuse.identity.keys import Tokens
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import open_store

__all__ = ["run"]

MODEL, LONGEST = "smollm2", 1536
_LENGTHS = (1, 16, 32, 64, 128, 200, 256, 384, 512, 768)
_BEHIND = (0, 64, 256, 512, 768)
#: Mbit/s and milliseconds of the links.
_LINKS = ((50, 40), (200, 2), (200, 40), (500, 20), (1000, 2), (4000, 2), (20_000, 1))


def run(options: Options) -> list[Figure]:
    """Median and 90th percentile of the relative error, for each kind of work."""
    engine = open_engine(MODEL, dtype="float32", reserve=LONGEST + 64)
    prompt = np.random.default_rng(11).integers(100, engine.space.vocab_size - 100, LONGEST).astype("<i4")
    cost = CostModel()
    options.step("prefills")
    longest = options.pick(200, 768)
    line, plain = _prefills(engine, prompt, cost, options.pick(8, 40), longest)
    options.step("loads")
    loads = _loads(engine, prompt, cost, options.pick(2, 12))
    options.step("fetches")
    fetches = _fetches(engine, prompt, cost, options.pick(1, 3), options.pick(384, 1024))
    figures = []
    for name, errors, baseline in (("prefill", line, plain), ("load", loads, None), ("fetch", fetches, None)):
        for share, value in (("median", statistics.median(errors)), ("p90", _p90(errors))):
            against = None if baseline is None else statistics.median(baseline) if share == "median" else _p90(baseline)
            figures.append(
                Figure(
                    metric=f"{name}, {share} error",
                    value=100 * value,
                    unit="%",
                    baseline=None if against is None else 100 * against,
                    better="lower",
                    note=f"{len(errors)} predictions" + ("; baseline: seconds a token" if baseline else ""),
                )
            )
    return figures


def _p90(errors: Sequence[float]) -> float:
    return sorted(errors)[math.ceil(0.9 * len(errors)) - 1]


def _prefills(
    engine: Engine, prompt: Tokens, cost: CostModel, count: int, longest: int
) -> tuple[list[float], list[float]]:
    """Errors of the fitted line and of plain seconds a token, on the second half."""
    rng = random.Random(3)
    lengths, behind = ([n for n in some if n <= longest] for some in (_LENGTHS, _BEHIND))
    cases = [(rng.choice(lengths), rng.choice(behind)) for _ in range(2 * count)]
    errors, plain, seconds, tokens = [], [], 0.0, 0
    for i, (n, p) in enumerate(cases):
        live = engine.new_context(LONGEST)
        if p:
            engine.prefill(live, prompt[:p])
        predicted = cost.prefill.seconds(n, p)
        start = time.perf_counter()
        engine.prefill(live, prompt[p : p + n])
        real = time.perf_counter() - start
        if i < count:
            cost.prefill.observe(n, p, real)
            seconds, tokens = seconds + real, tokens + n
        else:
            assert predicted is not None
            errors.append(abs(predicted - real) / real)
            plain.append(abs(seconds / tokens * n - real) / real)
    return errors, plain


def _loads(engine: Engine, prompt: Tokens, cost: CostModel, count: int) -> list[float]:
    """Errors for a stored prefix and a rest long enough that the two do not overlap."""
    errors = []
    lengths = [128, 512, 256, 1024]
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as folder, open_store(folder) as store:
        runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0, cost=cost))
        runtime.warm(prompt[: max(lengths)])
        store.flush()
        for i in range(2 * count):
            stored = lengths[i % len(lengths)]
            # Another continuation each time, so that no more than this is held.
            rest = np.random.default_rng(100 + i).integers(100, 40_000, 300).astype("<i4")
            runtime.prefill(np.concatenate([prompt[:stored], rest]))
            record = cost.log.records()[-1]
            if i >= count and record.error is not None:
                errors.append(record.error)
    return errors


def _fetches(engine: Engine, prompt: Tokens, cost: CostModel, rounds: int, context: int) -> list[float]:
    """Errors of whatever way was chosen, over every link."""
    held = Held(engine, prompt[:context])
    errors = []
    for _ in range(rounds):
        for mbit, rtt in _LINKS:
            bandwidth, trip = mbit * 1e6 / 8, rtt / 1e3
            remote = NearbyRemote(held, constant(bandwidth, trip), offered=bandwidth, rtt=trip)
            Runtime(engine, None, RuntimeOptions(context_cache_bytes=0, remote=remote, cost=cost)).prefill(
                prompt[: context + 32]
            )
            error = cost.log.records()[-1].error
            if error is not None:
                errors.append(error)
    return errors
