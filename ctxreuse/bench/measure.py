"""How benches measure: paired rounds, medians, warm-up, fresh processes.

On a machine that others use as well, a single time means little. So ours and the comparison take turns round by round,
and what is reported is the median; a ratio of medians over paired rounds moves far less than either time.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ctxreuse.errors import EngineError

__all__ = ["FRESH_TIMEOUT", "Options", "Step", "aligned", "fresh", "paired", "processor_time", "seconds"]

T = TypeVar("T")
#: Seconds that a process of a bench may take.
FRESH_TIMEOUT = 600.0
_CALL = "import json, sys; from {module} import {name}; print(json.dumps({name}(*sys.argv[1:])))"


class Step:
    """Says on standard error what is being measured: a spinner, and a bar where the number of steps is known."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self._name = name
        self._task = self._bars.add_task(f"bench {name}", total=None)
        self._bars.start()

    def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None:
        self._bars.update(self._task, description=f"bench {self._name}: {text}", completed=done or 0, total=total)

    def close(self) -> None:
        """Remove the spinner."""
        self._bars.stop()


class Options:
    """What a bench is run with: ``quick`` asks for less data and fewer rounds.

    The others are settings of single benches, which name them in ``OPTIONS``: ``model`` to measure on, ``texts``
    (files) to measure with, ``plot`` (a file) to draw.
    """

    def __init__(
        self,
        *,
        quick: bool = False,
        step: Step | None = None,
        model: str | None = None,
        texts: Sequence[Path] = (),
        plot: Path | None = None,
    ) -> None:
        self.quick, self._step = quick, step
        self.model, self.texts, self.plot = model, tuple(texts), plot

    def pick(self, quick: T, full: T) -> T:
        """The first value under ``--quick``, else the second."""
        return quick if self.quick else full

    def step(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Tell the user what is being measured now, and that ``done`` of ``total`` steps are behind."""
        if self._step is not None:
            self._step(text, done, total)

    def close(self) -> None:
        """End the display."""
        if self._step is not None:
            self._step.close()


def aligned(*shape: int) -> Any:
    """A float32 array at a multiple of 64 bytes, as engines put theirs (numpy's are at 16), its pages present."""
    import numpy as np

    size = 4 * math.prod(shape)
    room = np.ones(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(np.float32).reshape(shape)


def seconds(call: Callable[[], object], *, rounds: int, warm: int = 1) -> float:
    """Median wall time of one call, after ``warm`` calls that do not count."""
    return paired({"": call}, rounds=rounds, warm=warm)[""]


def paired(calls: Mapping[str, Callable[[], object]], *, rounds: int, warm: int = 1) -> dict[str, float]:
    """Median wall time of each call in seconds; the calls take turns, each round in the opposite order of the last."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-warm, rounds):
        order = list(calls) if turn % 2 else list(calls)[::-1]
        for name in order:
            start = time.perf_counter()
            calls[name]()
            spent = time.perf_counter() - start
            if turn >= 0:
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def processor_time(calls: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Median processor time of each call on this thread, in seconds; the calls take turns, one warm-up each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, rounds):
        for name in list(calls) if turn % 2 else list(calls)[::-1]:
            start = time.thread_time()
            calls[name]()
            if turn >= 0:
                times[name].append(time.thread_time() - start)
    return {name: statistics.median(spent) for name, spent in times.items()}


def fresh(call: str | Callable[..., object], *arguments: object) -> Any:
    """Run ``call`` in a new process; returns its result, or the JSON value of its last line of output.

    Args:
        call: a function of a module that takes strings and returns a JSON value; or Python code.
        arguments: given as strings, to code as ``sys.argv[1:]``.

    Raises EngineError with the end of its standard error if it fails.
    """
    code = call if isinstance(call, str) else _CALL.format(module=call.__module__, name=call.__name__)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FRESH_TIMEOUT, check=False)
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise EngineError(f"a process of the benchmark failed: {tail[0]}", where=f"exit status {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])
