"""The pool of engine processes: a queue of jobs that tenants share, and audits."""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from ctxreuse.bus.protocol.messages import Verify
from ctxreuse.config import EngineConfig, LogConfig
from ctxreuse.errors import LinkDownError
from ctxreuse.fair import FairQueue
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.peer.serve.engine import BURST
from ctxreuse.peer.serve.prefill import DISPLACED, PrefillSink
from ctxreuse.peer.serve.verify import VerdictSink
from ctxreuse_cloud.workers.pipe import AuditRequest, Job, Open, VerifyAnswer
from ctxreuse_cloud.workers.process import Answer, Ticket, WorkerProcess, WorkerStatus

__all__ = ["WorkerPool"]

log = logging.getLogger(__name__)

# A job may have killed its process: it is tried once more, then refused.
_ATTEMPTS = 2


class _Answering:
    """An answer that a process decodes; an `Answering`."""

    def __init__(self, worker: WorkerProcess, job: int) -> None:
        self._worker, self._job = worker, job

    def draft(self, start: int, tokens: Tokens) -> None:
        self._worker.draft(self._job, start, tokens)

    def cancel(self) -> None:
        self._worker.end_answer(self._job)


class WorkerPool:
    """Engine processes, a `ctxreuse.peer.serve.prefill.Prefiller` and a `ctxreuse.peer.serve.verify.DraftVerifier`.
    Thread-safe.

    Args:
        count: number of processes.
        engine: settings of each; ``threads`` 0 divides the cores among them.
        logs: settings of their logs.
        store: folder of the node's store, which they read; "": none.
        max_waiting: jobs that may be queued; where several tenants queue, each has a share.
        on_open: called, in a thread of the pool, with each model space that becomes available.
    """

    def __init__(
        self,
        count: int,
        engine: EngineConfig,
        logs: LogConfig,
        *,
        store: str = "",
        max_waiting: int = 64,
        on_open: Callable[[ModelSpace], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        threads = engine.threads or max(1, (os.cpu_count() or 1) // max(1, count))
        opening = Open(msgspec.structs.replace(engine, threads=threads), logs, store)
        self._lock = threading.Lock()
        self._settled = threading.Condition()
        self._on_open = on_open
        self._waiting = FairQueue[bytes, Ticket](max_waiting, BURST)
        self._numbers = itertools.count(1)
        self._spaces: dict[bytes, ModelSpace] = {}
        self._closed = False
        rng = rng or random.Random()
        self._workers = [WorkerProcess(i, opening, self, random.Random(rng.random())) for i in range(count)]

    def start(self) -> None:
        """Start the processes; returns at once, before their models are loaded."""
        for worker in self._workers:
            worker.start()

    @property
    def spaces(self) -> dict[bytes, ModelSpace]:
        """Available model spaces, by digest."""
        with self._lock:
            return dict(self._spaces)

    def submit(
        self, space: bytes, salt: bytes, tokens: Tokens, first: int, sink: PrefillSink, audited: int
    ) -> Callable[[], None] | None:
        """See `ctxreuse.peer.serve.prefill.Prefiller.submit`."""
        ticket = Ticket(Job(next(self._numbers), salt, first, audited), tokens, sink)
        with self._lock:
            model = self._spaces.get(space)
            if self._closed or model is None:
                return None
            computed = max(model.block_tokens, len(tokens) - audited * model.block_tokens)
            displaced = self._waiting.push(ticket.tenant, ticket, computed)
        if displaced is ticket:
            return None
        if displaced is not None:
            displaced.sink.end(DISPLACED)
        self._dispatch()
        return lambda: self._cancel(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        """Cancel a job; a call of its sink may be running."""
        ticket.cancelled = True
        with self._lock:
            if self._waiting.remove(ticket.tenant, ticket):
                return
        for worker in self._workers:
            worker.cancel(ticket)

    def verifies(self) -> list[ModelSpace]:
        """See `ctxreuse.peer.serve.verify.DraftVerifier.verifies`: not in those that cannot forget a wrong draft."""
        return [space for space in self.spaces.values() if not space.needs_state]

    def verify(self, salt: bytes, request: Verify, audited: int, sink: VerdictSink) -> _Answering | None:
        """See `ctxreuse.peer.serve.verify.DraftVerifier.verify`; where the fewest answers are decoded."""
        number, brief = next(self._numbers), msgspec.structs.replace(request, tokens=request.tokens[:4])
        for worker in sorted(self._workers, key=lambda worker: worker.answers):
            if worker.verify(VerifyAnswer(number, salt, audited, brief), request.tokens, sink):
                return _Answering(worker, number)
        return None

    def audit(self, space: bytes, keys: Sequence[bytes], first: int, state: bytes) -> Answer:
        """Return `audit_stored` of a process of this space; the future raises LinkDownError if there is none.

        ``state``: its sealed bytes, b"" for blocks.
        """
        up = [worker for worker in self._workers if worker.can_answer] if space in self.spaces else []
        if not up:
            answer: Answer = Future()
            answer.set_exception(LinkDownError("no engine process computes in this model space"))
            return answer
        # An idle one answers at once, a busy one after its current step.
        worker = min(up, key=lambda worker: worker.state != "idle")
        return worker.audit(AuditRequest(next(self._numbers), first, len(keys)), b"".join([*keys, state]))

    def settle(self, timeout: float) -> bool:
        """Wait until every process is up or broken; False after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._settled:
            while any(worker.state in ("starting", "restarting") for worker in self._workers):
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return False
                self._settled.wait(left)
        return True

    @property
    def up(self) -> int:
        """Number of processes that are up."""
        return sum(worker.can_answer for worker in self._workers)

    @property
    def waiting(self) -> int:
        """Number of queued jobs."""
        return len(self._waiting)

    def status(self) -> list[WorkerStatus]:
        """Return the state of each process."""
        return [worker.status() for worker in self._workers]

    def close(self) -> None:
        """End the processes; queued and running jobs fail. Idempotent."""
        with self._lock:
            self._closed = True
            left = self._waiting.clear()
        for worker in self._workers:
            worker.stop()
        self.on_settled()
        for worker in self._workers:
            worker.join()
        for ticket in left:
            if not ticket.cancelled:
                ticket.sink.end("the node is stopping")

    # Events of the processes.

    def on_idle(self, worker: WorkerProcess) -> None:
        """See `WorkerEvents`."""
        self._dispatch()

    def on_settled(self) -> None:
        """See `WorkerEvents`."""
        with self._settled:
            self._settled.notify_all()

    def on_ready(self, space: ModelSpace) -> None:
        """See `WorkerEvents`."""
        with self._lock:
            fresh = space.digest not in self._spaces
            self._spaces[space.digest] = space
        if fresh and self._on_open is not None:
            self._on_open(space)

    def on_died(self, ticket: Ticket, why: str) -> None:
        """See `WorkerEvents`."""
        if ticket.cancelled:
            return
        with self._lock:
            again = ticket.attempts < _ATTEMPTS and not self._closed
            if again:
                self._waiting.put_back(ticket.tenant, ticket)
        if again:
            self._dispatch()
        else:
            ticket.sink.end(why)

    def _dispatch(self) -> None:
        while True:
            with self._lock:
                for worker in sorted(self._workers, key=lambda worker: worker.running):
                    if (found := self._waiting.pop(worker.takes)) is not None:
                        break
                else:
                    return
            tenant, ticket = found
            if not worker.assign(ticket):
                with self._lock:
                    self._waiting.put_back(tenant, ticket)
