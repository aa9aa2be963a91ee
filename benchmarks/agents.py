"""Jobs a minute of four agents whose tools sleep, sharing a store that holds two contexts: ours against LRU, live.

SmolLM2 computes; nothing is simulated but the tools, which sleep. Two agents call quick tools (a file is read: a
quarter of what a job's first prompt takes to compute here), two slow ones (a build: four times as much). A job is a
context of 512 tokens and six turns of 4 tokens answered and 64 tokens of tool results; the next job is of another
context, and the old one is over. The store on disk has room for two contexts, and no context stays in the engine's
memory, so evicted blocks are computed again.

Both sides get the same hints: which tool an answer calls. LRU ignores them; ours is the store's default, the adaptive
policy, whose hazard expert learns from nothing in each run. Runs are paired: equal jobs, equal sleeps, one
side after the other, the order changing.
"""

from __future__ import annotations

import tempfile
import threading
import time
from typing import Any

import numpy as np

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.identity.keys import Tokens

__all__ = ["run"]

_CONTEXT, _TURNS, _RESULT, _ANSWER = 512, 6, 64, 4
_ROOM = 2.0
#: (tool, median time in first prompts' prefills) by agent.
_AGENTS = (("tool:read_file", 0.25), ("tool:edit_file", 0.25), ("tool:run_build", 4.0), ("tool:shell", 4.0))
#: How long a run is, in the same unit.
_LENGTH = 60


def _ids(rng: np.random.Generator, engine: Any, count: int) -> Tokens:
    return rng.integers(100, engine.space.vocab_size - 100, count).astype("<i4")


class _Agent(threading.Thread):
    """Works until ``end``; counts the turns that it was answered, and what they found."""

    def __init__(self, runtime: Any, number: int, seed: int, unit: float, end: float) -> None:
        super().__init__(name=f"agent {number}", daemon=True)
        self._runtime, self._end = runtime, end
        self._tool, median = _AGENTS[number]
        self._median = median * unit
        self._rng = np.random.default_rng((seed, number))
        self.turns = self.prompt = self.cached = 0
        self.failed: BaseException | None = None

    def run(self) -> None:
        try:
            while time.perf_counter() < self._end:
                self._job()
        except BaseException as error:
            self.failed = error

    def _job(self) -> None:
        from ctxreuse.engines.sampling import SamplingParams

        ids = _ids(self._rng, self._runtime.engine, _CONTEXT)
        sampling = SamplingParams(max_tokens=_ANSWER, temperature=0.0, ignore_eos=True)
        for _ in range(_TURNS):
            sleep, result = (
                self._rng.lognormal(np.log(self._median), 0.3),
                _ids(self._rng, self._runtime.engine, _RESULT),
            )
            answer = self._runtime.complete(ids, sampling)
            answer.drain()
            if time.perf_counter() > self._end:
                return
            self.turns += 1
            self.prompt += answer.usage.prompt_tokens
            self.cached += answer.usage.cached_tokens
            ids = np.concatenate([ids, np.array(answer.tokens, "<i4")])
            self._runtime.pause(ids, self._tool)
            time.sleep(min(sleep, max(0.0, self._end - time.perf_counter())))
            ids = np.concatenate([ids, result])
        self._runtime.pause(ids, "closed")


def _scale(engine: Any) -> tuple[int, float]:
    """Bytes of a finished context in a store, and seconds of a first prompt's prefill."""
    from ctxreuse.runtime import Runtime, RuntimeOptions
    from ctxreuse.store import BlockStore

    rng, times = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as folder, BlockStore.open(folder) as store:
        runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0))
        runtime.warm(_ids(rng, engine, _CONTEXT + _TURNS * (_RESULT + _ANSWER)))
        store.flush()
        nbytes = store.stats().nbytes
        for _ in range(3):
            ids, start = _ids(rng, engine, _CONTEXT), time.perf_counter()
            runtime.warm(ids)
            times.append(time.perf_counter() - start)
    return nbytes, float(np.median(times))


def _round(engine: Any, ours: bool, capacity: int, seed: int, unit: float, seconds: float) -> tuple[float, float]:
    """Jobs a minute, and the share of prompt tokens that were found."""
    from ctxreuse.runtime import Runtime, RuntimeOptions
    from ctxreuse.store import BlockStore

    policy = "adaptive" if ours else "lru"
    with tempfile.TemporaryDirectory() as folder, BlockStore.open(folder, capacity=capacity, policy=policy) as store:
        runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0))
        end = time.perf_counter() + seconds
        agents = [_Agent(runtime, number, seed, unit, end) for number in range(len(_AGENTS))]
        for agent in agents:
            agent.start()
        for agent in agents:
            agent.join()
        runtime.close()
    for agent in agents:
        if agent.failed is not None:
            raise agent.failed
    turns, prompt = sum(agent.turns for agent in agents), sum(agent.prompt for agent in agents)
    return turns / _TURNS * 60 / seconds, sum(agent.cached for agent in agents) / max(1, prompt)


def run(options: Options) -> list[Figure]:
    """The medians, and the least of the ratios, which has the bar."""
    from ctxreuse.engines import open_engine

    engine = open_engine("smollm2", engine="torch")
    options.step("a context's size and time")
    nbytes, unit = _scale(engine)
    capacity, seconds, pairs = int(_ROOM * nbytes), options.pick(20, _LENGTH) * unit, options.pick(1, 3)
    done: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for pair in range(pairs):
        for ours in (True, False) if pair % 2 else (False, True):
            options.step(f"pair {pair + 1} of {pairs}, {'ours' if ours else 'lru'}", 2 * pair, 2 * pairs)
            done[ours].append(_round(engine, ours, capacity, pair, unit, seconds))
    least = 60 / seconds / _TURNS  # one turn in all: a machine that is too busy for any more says nothing
    ratios = [max(a[0], least) / max(b[0], least) for a, b in zip(done[True], done[False])]
    medians = {ours: np.median(np.array(rows), axis=0).tolist() for ours, rows in done.items()}
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    said = f"{pairs} paired runs of {seconds:.0f} s, a prefill {unit:.2g} s; ratios {each}"
    return [
        Figure(metric="jobs_a_minute", value=medians[True][0], unit="jobs/min", baseline=medians[False][0], note=said),
        Figure(
            metric="tokens_found", value=medians[True][1], unit="share", baseline=medians[False][1], note="of prompts"
        ),
        Figure(
            metric="least_ratio",
            value=min(ratios),
            unit="x",
            bar=None if options.quick else 1.0,
            note="ours to LRU in the worst run",
        ),
    ]
