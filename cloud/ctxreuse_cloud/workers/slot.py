"""One engine process and the two threads that speak with it: started, watched, and started again when it dies."""

from __future__ import annotations

import logging
import queue
import random
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.bus.serve_prefill import Sink
from ctxreuse.errors import CtxReuseError, LinkDownError
from ctxreuse.keys import Tokens
from ctxreuse.model import ModelSpace
from ctxreuse.store.base import Buffer
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

__all__ = ["Answer", "Crew", "Slot", "State", "Ticket", "WorkerStanding"]

log = logging.getLogger(__name__)

State = Literal["starting", "idle", "busy", "restarting", "broken", "stopped"]

#: ``first_rows``: layer and K, or None where the model has none that could be compared.
Answer = Future[tuple[int, npt.NDArray[np.float32]] | None]

# Seconds before a process that died is started again, doubled each time it dies without having done anything.
_PAUSE, _LONGEST = 0.5, 30.0
# What a process may take to end after its socket was closed.
_GRACE = 10.0


class WorkerStanding(msgspec.Struct, frozen=True):
    """How one process stands, for ``status``."""

    number: int
    state: State
    pid: int
    jobs: int
    tokens: int
    seconds: float
    restarts: int
    said: str


class Ticket:
    """One job on its way through the crew."""

    def __init__(self, job: Job, tokens: Tokens, sink: Sink) -> None:
        self.job, self.tokens, self.sink = job, tokens, sink
        #: Blocks that the sink has: a second attempt makes them again, and they are not given twice.
        self.had: set[int] = set()
        self.attempts = 0
        self.cancelled = False


class Crew(Protocol):
    """What a slot asks of those who hold the queue."""

    def next(self, slot: Slot) -> None:
        """The slot can take a ticket."""
        ...

    def failed(self, ticket: Ticket, why: str) -> None:
        """The process died over this ticket."""
        ...

    def settled(self) -> None:
        """The process is up, or will not be."""
        ...

    def opened(self, space: ModelSpace) -> None:
        """A process computes in this space."""
        ...


class Slot:
    """Number ``number`` of the crew. ``assign``, ``ask``, ``cancel`` and ``stop`` may be called from any thread."""

    def __init__(self, number: int, settings: Open, crew: Crew, rng: random.Random) -> None:
        self.number, self._settings, self._crew, self._rng = number, settings, crew, rng
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._pipe: Pipe | None = None
        self._outbox: queue.SimpleQueue[tuple[Message, Buffer] | None] = queue.SimpleQueue()
        self._ticket: Ticket | None = None
        self._asks: dict[int, Answer] = {}
        self._pid = self._jobs = self._tokens = self._restarts = 0
        self._seconds = 0.0
        self._said = ""
        self.state: State = "starting"
        self._thread = threading.Thread(target=self._live, name=f"worker-{number}", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    @property
    def can_answer(self) -> bool:
        """True if the process is up."""
        return self.state in ("idle", "busy")

    def standing(self) -> WorkerStanding:
        """How it stands now."""
        counts = (self._pid, self._jobs, self._tokens, self._seconds, self._restarts)
        return WorkerStanding(self.number, self.state, *counts, self._said)

    def assign(self, ticket: Ticket) -> bool:
        """Compute this; False if the process has died since the crew was told that it can take one."""
        with self._lock:
            if self.state != "idle":
                return False
            self._ticket = ticket
            ticket.attempts += 1
            self.state = "busy"
            outbox = self._outbox
        outbox.put((ticket.job, np.ascontiguousarray(ticket.tokens, "<i4").view(np.uint8)))
        return True

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for it any more; nothing happens if it is not here."""
        with self._lock:
            if self._ticket is ticket:
                self._outbox.put((Cancel(ticket.job.job), b""))

    def ask(self, number: int, tokens: Tokens, positions: Tokens) -> Answer:
        """Rows of the first layer's K; the answer raises LinkDownError if the process dies before."""
        answer: Answer = Future()
        payload = np.concatenate((tokens, positions)).astype("<i4").view(np.uint8)
        with self._lock:
            if not self.can_answer:
                answer.set_exception(LinkDownError("no engine process is up"))
                return answer
            self._asks[number] = answer
            self._outbox.put((Rows(number, len(tokens)), payload))
        return answer

    def stop(self) -> None:
        """End the process; what it computes is lost. Returns at once, see `join`."""
        self._stopping.set()
        with self._lock:
            if self._pipe is not None:
                self._pipe.shut()

    def join(self) -> None:
        """Wait until process and threads have ended."""
        self._thread.join()

    def _live(self) -> None:
        pause = _PAUSE
        while not self._stopping.is_set():
            done = self._jobs
            broken = self._one_life()
            if self._stopping.is_set():
                break
            if broken:
                self.state = "broken"
                self._crew.settled()
                log.error("an engine process cannot work: %s", self._said, extra={"worker": self.number})
                self._stopping.wait()
                break
            self._restarts += 1
            pause = _PAUSE if self._jobs > done else min(_LONGEST, 2 * pause)
            self.state = "restarting"
            wait = pause * self._rng.uniform(0.5, 1.0)
            log.warning("an engine process died", extra={"worker": self.number, "again_in": round(wait, 2)})
            self._stopping.wait(wait)
        self.state = "stopped"

    def _one_life(self) -> bool:
        """From start to death; True if starting again is of no use."""
        try:
            process, pipe = _started()
        except OSError as error:  # no memory or no descriptors left: that may pass
            self._said = str(error)
            return False
        outbox: queue.SimpleQueue[tuple[Message, Buffer] | None] = queue.SimpleQueue()
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
            self._said = str(error)
        except Exception:
            # What it sent is nonsense, or whoever waited for it failed: neither may end this thread.
            log.exception("an engine process is given up", extra={"worker": self.number})
        finally:
            self._died(process, pipe, outbox, feeder)
        return broken

    def _died(
        self,
        process: subprocess.Popen[bytes],
        pipe: Pipe,
        outbox: queue.SimpleQueue[tuple[Message, Buffer] | None],
        feeder: threading.Thread,
    ) -> None:
        with self._lock:
            self._pipe, self.state = None, "restarting"
            ticket, self._ticket = self._ticket, None
            asks, self._asks = self._asks, {}
        pipe.shut()
        outbox.put(None)
        feeder.join()
        pipe.close()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._said = self._said or f"exit status {process.returncode}"
        for answer in asks.values():
            answer.set_exception(LinkDownError("the engine process died"))
        if ticket is not None:
            self._crew.failed(ticket, "the engine process died")

    def _take(self, message: Message, payload: Payload) -> bool:
        """One message of the process; True if it says that it can never work."""
        if isinstance(message, Made):
            ticket = self._ticket
            if ticket is not None and ticket.job.job == message.job and not ticket.cancelled:
                if message.kind == "state":
                    ticket.sink.state(payload)
                elif message.item not in ticket.had:
                    ticket.had.add(message.item)
                    ticket.sink.block(message.item, payload)
        elif isinstance(message, Ended):
            with self._lock:
                ticket, self._ticket = self._ticket, None
                self.state = "idle"
            self._jobs += 1
            self._tokens += message.tokens
            self._seconds += message.seconds
            if ticket is not None and not ticket.cancelled:
                ticket.sink.end(message.failed)
            self._crew.next(self)
        elif isinstance(message, Found):
            with self._lock:
                answer = self._asks.pop(message.ask, None)
            if answer is not None:
                rows = payload.view("<f4")
                answer.set_result(None if message.layer < 0 else (message.layer, rows.reshape(message.shape)))
        elif isinstance(message, Ready):
            self._said = ""
            log.info("an engine process is ready", extra={"worker": self.number, "pid": self._pid})
            self._crew.opened(message.space)
            with self._lock:
                self.state = "idle"
            self._crew.settled()
            self._crew.next(self)
        elif isinstance(message, Broken):
            self._said = message.what
            return True
        return False


def _started() -> tuple[subprocess.Popen[bytes], Pipe]:
    """A new process and our end of the pipe to it. Raises OSError."""
    here, there = socket.socketpair()
    with there:
        command = [sys.executable, "-m", "ctxreuse_cloud.worker", str(there.fileno())]
        try:
            return subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL), Pipe(here)
        except OSError:
            here.close()
            raise


def _feed(pipe: Pipe, outbox: queue.SimpleQueue[tuple[Message, Buffer] | None]) -> None:
    """Sends what lies in the outbox, so that nobody else waits for a process that computes."""
    while (entry := outbox.get()) is not None:
        try:
            pipe.send(*entry)
        except OSError:
            return  # the reading side sees it too, and says so
