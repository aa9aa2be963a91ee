"""An engine process: computes blocks for the node that started it, and ends when that node does.

Started by the node as ``python -m ctxreuse_cloud.worker FD`` with one end of a socket pair.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from ctxreuse.bus.serve_engine import Made as Item
from ctxreuse.bus.serve_engine import compute_blocks
from ctxreuse.daemon import logs
from ctxreuse.engines.base import Engine
from ctxreuse.errors import CtxReuseError, StoreError
from ctxreuse.store import Store, open_store
from ctxreuse_cloud.workers.pipe import (
    Broken,
    Cancel,
    Ended,
    Found,
    Job,
    Made,
    Message,
    Open,
    Payload,
    Pipe,
    Ready,
    Rows,
)

__all__ = ["Computing", "main"]

log = logging.getLogger(__name__)


class Computing:
    """One job at a time, cut into steps; between them questions are answered and cancels obeyed."""

    def __init__(
        self,
        engine: Engine,
        pipe: Pipe,
        store: Store | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._pipe, self._store, self._clock = engine, pipe, store, clock
        self._job: Job | None = None
        self._items: Iterator[Item] = iter(())
        self._tokens = 0
        self._spent = 0.0

    @property
    def busy(self) -> bool:
        """True while a job is under way."""
        return self._job is not None

    def take(self, message: Message, payload: Payload) -> None:
        """A message of the node's."""
        if isinstance(message, Job):
            tokens = payload.view("<i4")
            self._job, self._tokens, self._spent = message, len(tokens), 0.0
            self._items = compute_blocks(
                self._engine, message.salt, tokens, message.first, store=self._store, held=message.held
            )
        elif isinstance(message, Cancel):
            if self._job is not None and self._job.job == message.job:
                self._end("cancelled")
        elif isinstance(message, Rows):
            self._rows(message, payload)

    def step(self) -> None:
        """Compute a little of the job under way."""
        assert self._job is not None
        started = self._clock()
        try:
            item = next(self._items, None)
        except CtxReuseError as error:
            self._end(error.what)
            return
        finally:
            self._spent += self._clock() - started
        if item is None:
            self._end("")
        else:
            index, kind, data = item
            self._pipe.send(Made(self._job.job, index, "state" if kind == "state" else "block"), data)

    def _end(self, failed: str) -> None:
        assert self._job is not None
        self._items = iter(())  # its context goes back to the engine
        job, self._job = self._job, None
        self._pipe.send(Ended(job.job, failed, self._tokens, self._spent))

    def _rows(self, ask: Rows, payload: Payload) -> None:
        numbers = payload.view("<i4")
        try:
            found = self._engine.first_rows(numbers[: ask.count], numbers[ask.count :])
        except CtxReuseError as error:
            log.warning("rows cannot be computed: %s", error)
            found = None
        if found is None:
            self._pipe.send(Found(ask.ask, -1, ()))
            return
        layer, rows = found
        rows = np.ascontiguousarray(rows, "<f4")
        self._pipe.send(Found(ask.ask, layer, rows.shape), rows.view(np.uint8).reshape(-1))


def _read(pipe: Pipe, inbox: queue.SimpleQueue[tuple[Message, Payload]]) -> None:
    """Until the node is gone; then this process is of no use to anybody, whatever it computes."""
    try:
        while (message := pipe.receive()) is not None:
            inbox.put(message)
    except (CtxReuseError, OSError) as error:
        log.error("the node cannot be understood: %s", error)
    os._exit(0)


def _beside(folder: str) -> Store | None:
    """The node's store, for reading: what lies there need not be computed again."""
    if not folder:
        return None
    try:
        return open_store(folder, readonly=True)
    except StoreError as error:
        log.warning("an engine process computes without the store: %s", error)
        return None


def main(number: int) -> None:
    """Serve the node at file descriptor ``number``; never returns."""
    # Ctrl-C and a service manager's SIGTERM reach all processes of the group; the node decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = Pipe(socket.socket(fileno=number))
    first = pipe.receive()
    if first is None or not isinstance(first[0], Open):
        os._exit(0)
    wanted = first[0]
    logs.setup("json" if wanted.log_format == "json" else "text", wanted.log_level)
    inbox: queue.SimpleQueue[tuple[Message, Payload]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True, name="node").start()
    from ctxreuse.engines import open_engine

    try:
        threads = wanted.threads or None
        engine = open_engine(wanted.model, dtype=wanted.dtype, threads=threads, chunk=wanted.chunk, whole=wanted.whole)
    except CtxReuseError as error:
        pipe.send(Broken(str(error)))
        os._exit(3)
    pipe.send(Ready(engine.space))
    computing = Computing(engine, pipe, _beside(wanted.store))
    while True:
        if computing.busy and inbox.empty():
            computing.step()
        else:
            computing.take(*inbox.get())


if __name__ == "__main__":
    main(int(sys.argv[1]))
