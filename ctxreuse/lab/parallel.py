"""Replays side by side: each policy at each capacity in a process of its own, over one trace that all map."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as Running
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, NamedTuple

from ctxreuse.errors import CtxReuseError
from ctxreuse.lab.packed import Packed
from ctxreuse.lab.replay import Line, Served, serve

__all__ = ["Task", "Timed", "served"]

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
    """The one who asked has gone."""


def served(
    trace: Packed,
    tasks: Sequence[Task],
    make: Make,
    line: Line,
    block_bytes: int,
    *,
    jobs: int,
    progress: Callable[[Task, int], None],
) -> Iterator[Timed]:
    """One result a task, in their order. ``progress``: told of a task under way and of requests done in all tasks.

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asked, who then says stop
    _own = Packed.load(Path(folder)), counts, stop, make, line, block_bytes


def _work(number: int, policy: str, capacity: int) -> Timed:
    trace, counts, stop, make, line, block_bytes = _own

    def told(done: int) -> None:
        counts[number] = done
        if stop.value:
            raise _StoppedError

    began = time.perf_counter()
    made = make(policy, capacity, line)
    found = serve(trace, made, capacity // block_bytes, block_bytes=block_bytes, progress=told)
    return Timed(found, time.perf_counter() - began)
