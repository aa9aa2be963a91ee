"""Uses the daemon's idle time for contexts that wait: lets go of memory, and reads ahead what is about to return."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ctxreuse.metrics import Metrics
from ctxreuse.runtime import Runtime

__all__ = ["Keeper"]

log = logging.getLogger(__name__)


class Keeper:
    """One thread that looks each ``interval`` seconds, and works while no request waits or runs. Close it.

    What is learnt of pauses lies in ``file`` between two lives of the daemon.
    """

    def __init__(self, runtime: Runtime, busy: Callable[[], bool], file: Path, *, interval: float = 0.5) -> None:
        self._waiting, self._busy, self._file, self._interval = runtime.waiting, busy, file, interval
        self._waiting.recall(file)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctxreuse-keeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._interval):
            if not self._busy():
                try:
                    self._waiting.work(lambda: self._busy() or self._end.is_set())
                except Exception:
                    # It must not end for one bad round: a daemon that keeps no memory free still answers.
                    log.exception("a round of idle work failed")

    def watch(self, metrics: Metrics) -> None:
        """Have the figures in the metrics."""
        waiting = self._waiting

        def look() -> None:
            metrics.set("ctxreuse_paused_contexts", len(waiting))
            metrics.total("ctxreuse_demoted_bytes_total", waiting.demoted)
            metrics.total("ctxreuse_prefetched_bytes_total", waiting.prefetched)
            metrics.total("ctxreuse_prefetched_returns_total", waiting.returned_ahead)

        metrics.watch(look)

    def close(self) -> None:
        """End the thread, after the step in the making, and write what was learnt."""
        self._end.set()
        self._thread.join()
        with suppress(OSError):
            self._waiting.save(self._file)
