"""Several policies at several capacities over one trace, beside the bounds."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future as Running
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import partial
from multiprocessing.context import SpawnContext
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from ctxreuse.errors import ConfigError, CtxReuseError
from ctxreuse.lab.bounds import Future
from ctxreuse.lab.packed import Packed
from ctxreuse.lab.replay import BOUNDS, Counting, Line, Outcome, Served, bound, count, serve
from ctxreuse.store.policy import make_policy
from ctxreuse.store.policy.native import NATIVE, NativeShadow

__all__ = ["About", "Study", "Task", "Timed", "default_capacities", "parse_capacity", "replay_in_processes"]

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}

#: Called with a policy and a capacity (bytes) under way, and of the requests done so far in all replays together.
Progress = Callable[[str, int, int], None]


_POLL = 0.1
#: Makes a policy by name for a capacity in bytes.
Make = Callable[[str, int, Line], Any]


class Task(NamedTuple):
    """A policy and a capacity in bytes."""

    policy: str
    capacity: int


class Timed(NamedTuple):
    """What a replay served, and the seconds that it took."""

    served: Served
    took: float


class _StoppedError(Exception):
    """The caller has stopped."""


def replay_in_processes(
    trace: Packed,
    tasks: Sequence[Task],
    make: Make,
    line: Line,
    block_bytes: int,
    *,
    jobs: int,
    progress: Callable[[Task, int], None],
) -> Iterator[Timed]:
    """Yield one result a task, in their order. ``progress``: called with a task and the requests done in all tasks.

    ``make`` is a function of a module, found by its name. Processes are started for the call and ended with it, also
    if it is left early; the trace goes to them through files in a temporary folder. Raises CtxReuseError if one dies.
    """
    context = multiprocessing.get_context("spawn")
    counts, stop = context.Array("q", len(tasks), lock=False), context.Value("b", 0, lock=False)
    with tempfile.TemporaryDirectory(prefix="ctxreuse-lab-") as folder:
        trace.save(Path(folder))
        given = (folder, counts, stop, make, line, block_bytes)
        with _pool(context, min(jobs, len(tasks)), given) as pool:
            try:
                running = [pool.submit(_work, number, *task) for number, task in enumerate(tasks)]
                for task, one in zip(tasks, running):
                    _wait(one, lambda task=task: progress(task, sum(counts)))  # type: ignore[misc]
                    yield one.result()
            except BrokenProcessPool as error:
                raise CtxReuseError(
                    "a process of the replay died", fix="It may have lacked memory: ask for fewer --jobs"
                ) from error
            finally:
                stop.value = 1
                pool.shutdown(cancel_futures=True)


def _pool(context: SpawnContext, jobs: int, given: tuple[Any, ...]) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, context, _begin, given)


def _wait(one: Running[Timed], tell: Callable[[], None]) -> None:
    while not one.done():
        tell()
        time.sleep(_POLL)
    tell()


# ---- In the processes.

_own: tuple[Packed, Any, Any, Make, Line, int]


def _begin(folder: str, counts: Any, stop: Any, make: Make, line: Line, block_bytes: int) -> None:
    global _own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which then stops us
    _own = Packed.load(Path(folder)), counts, stop, make, line, block_bytes


def _work(number: int, policy: str, capacity: int) -> Timed:
    trace, counts, stop, make, line, block_bytes = _own

    def report(done: int) -> None:
        counts[number] = done
        if stop.value:
            raise _StoppedError

    began = time.perf_counter()
    made = make(policy, capacity, line)
    found = serve(trace, made, capacity // block_bytes, block_bytes=block_bytes, progress=report)
    return Timed(found, time.perf_counter() - began)


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a study is of: the trace, and what its figures are counted with."""

    trace: str
    requests: int
    blocks: int
    tokens: int
    block_tokens: int
    block_bytes: int
    seconds: float
    token_seconds: float
    pair_seconds: float


class Study:
    """One trace, one size of a block, one price of prefill.

    ``window``: the requests that are counted, default all; those before fill the cache only. ``make``: a policy by
    name for a capacity in bytes, or a shadow; the default knows those of the store, and ``adaptive:lru+arc`` with other
    experts.
    """

    def __init__(
        self,
        trace: Packed,
        *,
        block_bytes: int,
        line: Line | None = None,
        window: tuple[int, int] | None = None,
        make: Callable[[str, int, Line], Any] | None = None,
    ) -> None:
        self.trace, self.block_bytes, self.line = trace, block_bytes, line or Line()
        self.window = window or (0, len(trace))
        self.future = Future(trace)
        self._make = make or _make

    @property
    def about(self) -> About:
        """The trace and the settings as plain values."""
        trace = self.trace
        return About(
            trace=trace.name,
            requests=len(trace),
            blocks=trace.blocks,
            tokens=int(trace.tokens.sum()),
            block_tokens=trace.block_tokens,
            block_bytes=self.block_bytes,
            seconds=float(trace.t[-1] - trace.t[0]),
            token_seconds=self.line.token,
            pair_seconds=self.line.pair,
        )

    def run(
        self,
        policies: Sequence[str],
        capacities: Sequence[int],
        progress: Progress = lambda name, capacity, done: None,
        *,
        jobs: int = 1,
    ) -> Iterator[Outcome]:
        """Yield the infinite cache, then at each capacity (bytes) Belady and the policies, each as it is done.

        ``progress``: see `Progress`. ``jobs``: processes that replay side by side. Raises ConfigError for an unknown
        policy or a capacity below one block, before anything runs.
        """
        for capacity in capacities:
            if capacity < self.block_bytes:
                raise ConfigError(
                    f"a capacity of {capacity:,} bytes is less than a block of {self.block_bytes:,}",
                    fix="Ask for more, or give the size of a block",
                )
            for name in policies:
                self._make(name, capacity, self.line)
        tasks = [Task(name, capacity) for capacity in capacities for name in policies]
        found = (
            self._side_by_side(tasks, progress, jobs) if jobs > 1 and len(tasks) > 1 else self._each(tasks, progress)
        )
        with closing(found):
            yield self._outcome("infinite", 0, bound(self.trace, "infinite", self.future, 0))
            for capacity in capacities:
                blocks = capacity // self.block_bytes
                yield self._outcome("belady", capacity, bound(self.trace, "belady", self.future, blocks))
                for name in policies:
                    served, took = next(found)
                    yield self._outcome(name, capacity, served, took)

    def _side_by_side(self, tasks: Sequence[Task], progress: Progress, jobs: int) -> Generator[Timed]:
        def report(task: Task, done: int) -> None:
            progress(*task, done)

        yield from replay_in_processes(
            self.trace, tasks, self._make, self.line, self.block_bytes, jobs=jobs, progress=report
        )

    def _each(self, tasks: Sequence[Task], progress: Progress) -> Generator[Timed]:
        for number, (name, capacity) in enumerate(tasks):
            yield self._replay(name, capacity, partial(_after, progress, name, capacity, number * len(self.trace)))

    def replay(self, name: str, capacity: int, progress: Callable[[int], None] = lambda done: None) -> Outcome:
        """Replay one policy at one capacity."""
        return self._outcome(name, capacity, *self._replay(name, capacity, progress))

    def _replay(self, name: str, capacity: int, progress: Callable[[int], None]) -> Timed:
        began = time.perf_counter()
        policy = self._make(name, capacity, self.line)
        blocks = capacity // self.block_bytes
        served = serve(self.trace, policy, blocks, block_bytes=self.block_bytes, progress=progress)
        return Timed(served, time.perf_counter() - began)

    def _outcome(self, name: str, capacity: int, served: Served, took: float = 0.0) -> Outcome:
        counting = Counting(self.block_bytes, self.line, self.window)
        return count(self.trace, served, self.future, counting, policy=name, capacity=capacity, took=took)


def _after(progress: Progress, name: str, capacity: int, before: int, done: int) -> None:
    progress(name, capacity, before + done)


def _make(name: str, capacity: int, line: Line) -> Any:
    if name in BOUNDS:
        raise ConfigError(f"{name} is a bound, no policy", fix="It is always shown; leave it out")
    if name in NATIVE:
        return NativeShadow(name, capacity, per_token=line.token, per_pair=line.pair)
    return make_policy(name.replace("+", ","), capacity, per_token=line.token, per_pair=line.pair, rng=Random(0))


def parse_capacity(text: str, token_bytes: float) -> int:
    """Return the bytes from ``4GB``, or from tokens: ``1Mtok``, ``500ktok``. Raises ConfigError."""
    from ctxreuse.units import parse_bytes

    short = text.strip().lower().removesuffix("ens").removesuffix("tok")
    if short == text.strip().lower():
        return parse_bytes(text)
    number, unit = short.strip(), ""
    if number and number[-1] in "kmg":
        number, unit = number[:-1].strip(), number[-1]
    try:
        tokens = float(number) * _SUFFIXES[unit]
    except ValueError:
        tokens = float("nan")
    if not 0 < tokens < 1e15:
        raise ConfigError(f"{text!r} is no number of tokens", fix="Write it as 500ktok or 2.6Mtok")
    return int(tokens * token_bytes)


def default_capacities(trace: Packed, block_bytes: int) -> list[int]:
    """Five sizes from 1/64 to 1/4 of all that the trace ever needs: where policies differ."""
    whole = trace.blocks * block_bytes
    sizes = [max(block_bytes, _rounded(whole >> shift)) for shift in (6, 5, 4, 3, 2)]
    return sorted(set(sizes))


def _rounded(size: int) -> int:
    """Two digits, as people would ask for it."""
    scale = int(10 ** max(len(str(size)) - 2, 0))
    return max(1, size // scale * scale)
