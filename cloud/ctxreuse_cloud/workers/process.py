"""One engine process and the two threads that serve it: started, watched, and restarted when it dies."""

from __future__ import annotations

import logging
import queue
import random
import threading
from concurrent.futures import Future
from typing import Literal, Protocol

import msgspec
import numpy as np

from ctxreuse.block.format import Buffer
from ctxreuse.engines.process.child import Backoff, ChildProcess
from ctxreuse.errors import CtxReuseError, EngineError, LinkDownError
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.peer.serve.prefill import PrefillSink
from ctxreuse.peer.serve.verify import VerdictSink
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

__all__ = ["Answer", "State", "Ticket", "WorkerEvents", "WorkerProcess", "WorkerStatus"]

log = logging.getLogger(__name__)

State = Literal["starting", "idle", "busy", "restarting", "broken", "stopped"]

#: Result of an audit; None: nothing can be said.
Answer = Future[bool | None]

# Jobs of so many tenants that one process computes side by side: each has a context in its memory.
_JOBS = 4
# Seconds for a process to end after its socket was closed.
_GRACE = 10.0


class WorkerStatus(msgspec.Struct, frozen=True):
    """State of one process, for ``status``."""

    number: int
    state: State
    pid: int
    jobs: int
    tokens: int
    seconds: float
    restarts: int
    error: str


class Ticket:
    """One job in the pool."""

    def __init__(self, job: Job, tokens: Tokens, sink: PrefillSink) -> None:
        self.job, self.tokens, self.sink = job, tokens, sink
        #: Names its tenant: the salt of its keys.
        self.tenant = job.salt
        #: Blocks that the sink has, which a second attempt does not deliver again.
        self.had: set[int] = set()
        self.attempts = 0
        self.cancelled = False


class WorkerEvents(Protocol):
    """Events of a worker process, for the pool that owns it."""

    def on_idle(self, worker: WorkerProcess) -> None:
        """The worker can take another job."""
        ...

    def on_died(self, ticket: Ticket, why: str) -> None:
        """The process died while it ran this job."""
        ...

    def on_settled(self) -> None:
        """The process is up, or broken."""
        ...

    def on_ready(self, space: ModelSpace) -> None:
        """The process computes in this model space."""
        ...


class WorkerProcess:
    """Process ``number`` of a pool. ``assign``, ``audit``, ``cancel`` and ``stop`` are thread-safe."""

    def __init__(self, number: int, settings: Open, events: WorkerEvents, rng: random.Random) -> None:
        self.number, self._settings, self._events, self._rng = number, settings, events, rng
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._pipe: Pipe | None = None
        self._outbox: queue.SimpleQueue[tuple[Message, Buffer] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._pending: dict[int, Answer] = {}
        self._answers: dict[int, VerdictSink] = {}
        self._pid = self._jobs = self._tokens = self._restarts = 0
        self._seconds = 0.0
        self._error = ""
        self.state: State = "starting"
        self._thread = threading.Thread(target=self._supervise, name=f"worker-{number}", daemon=True)

    def start(self) -> None:
        """Start it; returns at once."""
        self._thread.start()

    @property
    def can_answer(self) -> bool:
        """True while the process is up."""
        return self.state in ("idle", "busy")

    def status(self) -> WorkerStatus:
        """Return its state."""
        counts = (self._pid, self._jobs, self._tokens, self._seconds, self._restarts)
        return WorkerStatus(self.number, self.state, *counts, self._error)

    @property
    def running(self) -> int:
        """Number of jobs that it runs."""
        return len(self._tickets)

    def takes(self, tenant: bytes) -> bool:
        """Return True if it can run a job of this tenant now: one of each, so that none waits behind long ones."""
        tickets = list(self._tickets.values())
        return self.can_answer and len(tickets) < _JOBS and all(ticket.tenant != tenant for ticket in tickets)

    def assign(self, ticket: Ticket) -> bool:
        """Run a job; False if the process no longer takes it."""
        with self._lock:
            if not self.takes(ticket.tenant):
                return False
            self._tickets[ticket.job.job] = ticket
            ticket.attempts += 1
            self.state = "busy"
            outbox = self._outbox
        outbox.put((ticket.job, np.ascontiguousarray(ticket.tokens, "<i4").view(np.uint8)))
        return True

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a job if it runs here."""
        with self._lock:
            if ticket.job.job in self._tickets:
                self._outbox.put((CancelJob(ticket.job.job), b""))

    @property
    def answers(self) -> int:
        """Number of answers that it decodes."""
        return len(self._answers)

    def verify(self, request: VerifyAnswer, tokens: bytes, sink: VerdictSink) -> bool:
        """Decode an answer; False if the process is not up."""
        with self._lock:
            if not self.can_answer:
                return False
            self._answers[request.job] = sink
            self._outbox.put((request, tokens))
        return True

    def draft(self, job: int, start: int, tokens: Tokens) -> None:
        """Pass a draft of an answer on, if it is decoded here."""
        with self._lock:
            if job in self._answers:
                self._outbox.put((DraftTokens(job, start), np.ascontiguousarray(tokens, "<i4").view(np.uint8)))

    def end_answer(self, job: int) -> None:
        """Give an answer up if it is decoded here."""
        with self._lock:
            if self._answers.pop(job, None) is not None:
                self._outbox.put((CancelJob(job), b""))

    def audit(self, request: AuditRequest, payload: bytes) -> Answer:
        """Audit; the future raises LinkDownError if the process dies, EngineError if the audit fails."""
        answer: Answer = Future()
        with self._lock:
            if not self.can_answer:
                answer.set_exception(LinkDownError("no engine process is up"))
                return answer
            self._pending[request.number] = answer
            self._outbox.put((request, payload))
        return answer

    def stop(self) -> None:
        """End the process and abandon its job; returns at once, see `join`."""
        self._stopping.set()
        with self._lock:
            if self._pipe is not None:
                self._pipe.shut()

    def join(self) -> None:
        """Wait until process and threads have ended."""
        self._thread.join()

    def _supervise(self) -> None:
        backoff = Backoff(self._rng)
        while not self._stopping.is_set():
            done = self._jobs
            broken = self._run_once()
            if self._stopping.is_set():
                break
            if broken:
                self.state = "broken"
                self._events.on_settled()
                log.error("an engine process is broken: %s", self._error, extra={"worker": self.number})
                self._stopping.wait()
                break
            self._restarts += 1
            self.state = "restarting"
            wait = backoff.died(useful=self._jobs > done)
            log.warning("an engine process died", extra={"worker": self.number, "again_in": round(wait, 2)})
            self._stopping.wait(wait)
        self.state = "stopped"

    def _run_once(self) -> bool:
        """Run the process once; True if restarting cannot help."""
        try:
            process = ChildProcess("ctxreuse_cloud.worker")
        except OSError as error:  # out of memory or descriptors: may pass
            self._error = str(error)
            return False
        pipe, outbox = Pipe(process.socket), queue.SimpleQueue[tuple[Message, Buffer] | None]()
        with self._lock:
            self._pipe, self._outbox, self._pid, self.state = pipe, outbox, process.pid, "starting"
        if self._stopping.is_set():
            pipe.shut()
        feeder = threading.Thread(target=_feed, args=(pipe, outbox), name=f"worker-{self.number}-feed", daemon=True)
        feeder.start()
        outbox.put((self._settings, b""))
        broken = False
        try:
            while (received := pipe.receive()) is not None:
                broken = self._take(*received) or broken
        except (CtxReuseError, OSError) as error:
            self._error = str(error)
        except Exception:
            # An invalid message, or a failing sink: neither may end this thread.
            log.exception("an engine process is abandoned", extra={"worker": self.number})
        finally:
            self._died(process, pipe, outbox, feeder)
        return broken

    def _died(
        self,
        process: ChildProcess,
        pipe: Pipe,
        outbox: queue.SimpleQueue[tuple[Message, Buffer] | None],
        feeder: threading.Thread,
    ) -> None:
        with self._lock:
            self._pipe, self.state = None, "restarting"
            tickets, self._tickets = self._tickets, {}
            pending, self._pending = self._pending, {}
            answers, self._answers = self._answers, {}
        pipe.shut()
        outbox.put(None)
        feeder.join()
        pipe.close()
        how = process.end(_GRACE)
        self._error = self._error or how
        for answer in pending.values():
            answer.set_exception(LinkDownError("the engine process died"))
        for sink in answers.values():
            sink.end("the engine process died")
        for ticket in tickets.values():
            self._events.on_died(ticket, "the engine process died")

    def _take(self, message: Message, payload: Payload) -> bool:
        """Take one message of the process; True if it reports that it is broken."""
        if isinstance(message, JobItem):
            ticket = self._tickets.get(message.job)
            if ticket is not None and not ticket.cancelled:
                if message.kind == "state":
                    ticket.sink.state(payload)
                elif message.item not in ticket.had:
                    ticket.had.add(message.item)
                    ticket.sink.block(message.item, payload)
        elif isinstance(message, VerdictMade):
            if (sink := self._answers.get(message.job)) is not None:
                sink.verdict(message.verdict)
        elif isinstance(message, JobEnded) and message.job in self._answers:
            with self._lock:
                sink = self._answers.pop(message.job, None)
            if sink is not None:
                sink.end(message.failed)
        elif isinstance(message, JobEnded):
            with self._lock:
                ticket = self._tickets.pop(message.job, None)
                self.state = "busy" if self._tickets else "idle"
            self._jobs += 1
            self._tokens += message.tokens
            self._seconds += message.seconds
            if ticket is not None and not ticket.cancelled:
                ticket.sink.end(message.failed)
            self._events.on_idle(self)
        elif isinstance(message, AuditDone):
            with self._lock:
                answer = self._pending.pop(message.number, None)
            if answer is not None and message.failed:
                answer.set_exception(EngineError(message.failed))
            elif answer is not None:
                answer.set_result(message.sound)
        elif isinstance(message, Ready):
            self._error = ""
            log.info("an engine process is ready", extra={"worker": self.number, "pid": self._pid})
            self._events.on_ready(message.space)
            with self._lock:
                self.state = "idle"
            self._events.on_settled()
            self._events.on_idle(self)
        elif isinstance(message, Broken):
            self._error = message.what
            return True
        return False


def _feed(pipe: Pipe, outbox: queue.SimpleQueue[tuple[Message, Buffer] | None]) -> None:
    """Send messages from the outbox, so that no caller waits for a process that computes."""
    while (entry := outbox.get()) is not None:
        try:
            pipe.send(*entry)
        except OSError:
            return  # the reading thread reports it
