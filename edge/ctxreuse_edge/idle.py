"""Idle tasks of the daemon: evicts KV of paused contexts from memory, prefetches what is about to resume, and gives
memory back that the C library keeps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ctxreuse.errors import CtxReuseError
from ctxreuse.kernels.dispatch import native as _native
from ctxreuse.metrics import Metrics
from ctxreuse.runtime import Runtime

__all__ = ["IdleTasks"]

log = logging.getLogger(__name__)

_INTERVAL = 0.5
#: Seconds without a request before what only some requests need is prepared: after a restart agents come at once, and
#: two cores are all that the engine has.
_SETTLED = 5.0
#: Seconds between two writings of what answers are drafted from.
_DRAFTS = 300.0
#: Seconds between two times that freed memory is given back: arenas keep some, 36 of 181 MB after long prompts, and
#: more and more of a daemon that is never idle (37 of 147 MB after 180,000 requests).
_TRIM = 60.0


class IdleTasks:
    """One thread that works twice a second unless the daemon is ``busy``; close it.

    ``file`` stores the learned pause lengths between runs; ``save`` is called in each round; ``daily``: in each, busy
    or not, for what must be done within a day; ``prepare``: once, when there was nothing else to do for a while.
    """

    def __init__(
        self,
        runtime: Runtime,
        busy: Callable[[], bool],
        file: Path,
        save: Callable[[], None],
        daily: Callable[[], object] = lambda: None,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._daily, self._prepare = daily, prepare
        self._paused, self._busy, self._file, self._save = runtime.paused, busy, file, save
        self._paused.recall(file)
        self._save_drafts = runtime.save_drafts
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctxreuse-idle", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        trimmed = settled = time.monotonic()
        prepared = False
        while not self._end.wait(_INTERVAL):
            try:
                self._daily()
                if self._busy():
                    settled = time.monotonic()
                else:
                    if not prepared and time.monotonic() - settled >= _SETTLED:
                        prepared = True
                        with suppress(CtxReuseError):  # the request that needs it says so
                            self._prepare()
                    self._save()
                    self._save_drafts(_DRAFTS)
                    self._paused.work(lambda: self._busy() or self._end.is_set())
                if time.monotonic() - trimmed >= _TRIM:  # busy or not, it takes some milliseconds
                    _native.trim_memory()
                    trimmed = time.monotonic()
            except Exception:
                # One failing round must not end the thread.
                log.exception("a round of idle work failed")

    def watch(self, metrics: Metrics) -> None:
        """Add the figures to the metrics."""
        paused = self._paused

        def update() -> None:
            metrics.set("ctxreuse_paused_contexts", len(paused))
            metrics.total("ctxreuse_demoted_bytes_total", paused.demoted)
            metrics.total("ctxreuse_prefetched_bytes_total", paused.prefetched)
            metrics.total("ctxreuse_prefetched_returns_total", paused.returned_ahead)

        metrics.watch(update)

    def close(self) -> None:
        """End the thread after its current step, and save the learned pause lengths."""
        self._end.set()
        self._thread.join()
        with suppress(OSError):
            self._paused.save(self._file)
