"""An engine process: computes blocks for the node that started it, and exits with it.

Started by the node as ``python -m ctxreuse_cloud.worker FD`` with one end of a socket pair.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from ctxreuse.block.format import parse
from ctxreuse.bus.log_limit import LimitedLog
from ctxreuse.daemon import logs
from ctxreuse.engines.base import Engine
from ctxreuse.errors import CtxReuseError, FormatError, StoreError
from ctxreuse.fair import Turns
from ctxreuse.identity.keys import KEY_BYTES
from ctxreuse.peer.serve.checker import AnswerChecker
from ctxreuse.peer.serve.engine import BURST, compute_blocks
from ctxreuse.peer.serve.engine import Made as Item
from ctxreuse.runtime.fetch.audit import audit_stored
from ctxreuse.store import Store, open_store
from ctxreuse_cloud.workers.pipe import (
    AuditDone,
    AuditRequest,
    Broken,
    CancelJob,
    DraftTokens,
    Job,
    JobEnded,
    JobItem,
    Message,
    Open,
    Payload,
    Pipe,
    Ready,
    VerdictMade,
    VerifyAnswer,
)

__all__ = ["Computing", "main"]

log = logging.getLogger(__name__)
limited = LimitedLog(log)


class _Running:
    """A job that is being computed."""

    def __init__(self, job: Job, tokens: int, items: Iterator[Item]) -> None:
        self.job, self.tokens, self.items, self.seconds = job, tokens, items, 0.0


class Computing:
    """Runs jobs in steps, their tenants in turn, and answers in passes; the two take turns, and between them it takes
    more of both, drafts, audits and cancels."""

    def __init__(
        self,
        engine: Engine,
        pipe: Pipe,
        store: Store | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._pipe, self._store, self._clock = engine, pipe, store, clock
        self._jobs: dict[int, _Running] = {}
        self._turns = Turns[bytes](BURST)
        self._answers = AnswerChecker(engine, store, clock)
        self._pass_first = True

    @property
    def busy(self) -> bool:
        """True while jobs run or answers are decoded."""
        return bool(self._jobs) or self._answers.busy

    def take(self, message: Message, payload: Payload) -> None:
        """Take a message of the node."""
        if isinstance(message, Job):
            tokens = payload.view("<i4")
            items = compute_blocks(
                self._engine, message.salt, tokens, message.first, store=self._store, audited=message.audited
            )
            self._jobs[message.job] = _Running(message, len(tokens), items)
        elif isinstance(message, CancelJob):
            if message.job in self._jobs:
                self._end(self._jobs[message.job], "cancelled")
            self._answers.close(message.job)
        elif isinstance(message, VerifyAnswer):
            request = msgspec.structs.replace(message.request, tokens=payload.tobytes())
            self._answers.open(message.job, message.salt, request, message.audited)
        elif isinstance(message, DraftTokens):
            self._answers.draft(message.job, message.start, payload.view("<i4"))
        elif isinstance(message, AuditRequest):
            self._pipe.send(self._audit(message, payload))

    def step(self) -> None:
        """Run one pass of the answers, or one step of the job whose tenant's turn it is."""
        if self._answers.busy and (self._pass_first or not self._jobs):
            self._pass_first = False
            self._check_answers()
            return
        self._pass_first = True
        by_tenant = {running.job.salt: running for running in reversed(self._jobs.values())}
        running = by_tenant[self._turns.order(by_tenant)[0]]
        started = self._clock()
        try:
            item = next(running.items, None)
        except CtxReuseError as error:
            self._end(running, error.what)
            return
        finally:
            running.seconds += self._clock() - started
        if item is None:
            self._end(running, "")
            return
        self._turns.charge(running.job.salt, self._engine.space.block_tokens)
        index, kind, data = item
        self._pipe.send(JobItem(running.job.job, index, "state" if kind == "state" else "block"), data)

    def _check_answers(self) -> None:
        for number, verdict, ended, failed in self._answers.step():
            if verdict is not None:
                self._pipe.send(VerdictMade(number, verdict))
            if ended:
                self._pipe.send(JobEnded(number, failed, 0, 0.0))

    def _end(self, running: _Running, failed: str) -> None:
        del self._jobs[running.job.job]
        running.items = iter(())  # returns its context to the engine
        self._pipe.send(JobEnded(running.job.job, failed, running.tokens, running.seconds))

    def _audit(self, request: AuditRequest, payload: Payload) -> AuditDone:
        raw, end = payload.tobytes(), request.count * KEY_BYTES
        keys = [raw[at : at + KEY_BYTES] for at in range(0, end, KEY_BYTES)]
        try:
            if self._store is None:
                raise LookupError("this process reads no store")
            state = parse(raw[end:]) if len(raw) > end else None
            # Peers must not be able to predict the rows.
            sound = audit_stored(self._engine, self._store, keys, request.first, state, random.SystemRandom())
            return AuditDone(request.number, sound)
        except FormatError as error:
            # Who gave it is known to the node only: of all peers together.
            limited.write("", logging.WARNING, "an audited block is no block of this model: %s", error)
            return AuditDone(request.number, False)
        except (CtxReuseError, LookupError, RuntimeError) as error:
            return AuditDone(request.number, None, str(error))


def _read(pipe: Pipe, inbox: queue.SimpleQueue[tuple[Message, Payload]]) -> None:
    """Receive messages; ends the process when the node is gone."""
    try:
        while (message := pipe.receive()) is not None:
            inbox.put(message)
    except (CtxReuseError, OSError) as error:
        log.error("invalid message from the node: %s", error)
    os._exit(0)


def _open_store(folder: str) -> Store | None:
    """Open the node's store for reading, to resume from its blocks."""
    if not folder:
        return None
    try:
        return open_store(folder, readonly=True)
    except StoreError as error:
        log.warning("the store cannot be read: %s", error)
        return None


def main(number: int) -> None:
    """Serve the node at file descriptor ``number``; never returns."""
    # Ctrl-C and SIGTERM reach all processes of the group; the node decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = Pipe(socket.socket(fileno=number))
    first = pipe.receive()
    if first is None or not isinstance(first[0], Open):
        os._exit(0)
    wanted = first[0]
    logs.setup(wanted.logs.format, wanted.logs.level)
    inbox: queue.SimpleQueue[tuple[Message, Payload]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True, name="node").start()
    from ctxreuse.engines import open_engine

    try:
        engine = open_engine(wanted.engine)
    except CtxReuseError as error:
        pipe.send(Broken(str(error)))
        os._exit(3)
    pipe.send(Ready(engine.space))
    computing = Computing(engine, pipe, _open_store(wanted.store))
    while True:
        if computing.busy and inbox.empty():
            computing.step()
        else:
            computing.take(*inbox.get())


if __name__ == "__main__":
    main(int(sys.argv[1]))
