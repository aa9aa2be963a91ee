"""All engine processes: one queue of jobs in front of them, and the rows that an audit asks for."""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from ctxreuse.bus.serve_prefill import Sink
from ctxreuse.config import EngineConfig, LogConfig
from ctxreuse.errors import LinkDownError
from ctxreuse.keys import Tokens
from ctxreuse.model import ModelSpace
from ctxreuse_cloud.workers.pipe import Job, Open
from ctxreuse_cloud.workers.slot import Answer, Slot, Ticket, WorkerStanding

__all__ = ["Workers"]

log = logging.getLogger(__name__)

# A job over which a process died may have killed it: it is tried once more, then refused.
_ATTEMPTS = 2


class Workers:
    """``count`` processes with one engine each: a `ctxreuse.bus.serve_prefill.Prefiller`. Any thread may call.

    ``threads`` of the engine settings are for each process; 0 shares the cores among them. ``store``: the node's
    folder, which they read. ``max_waiting``: jobs that may wait for a process. ``on_open`` is called, in a thread of a
    worker, with each model space that comes to be served.
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
        settings = Open(engine.model, engine.dtype, threads, engine.chunk, engine.whole, store, logs.format, logs.level)
        self._lock = threading.Lock()
        self._settled = threading.Condition()
        self._max_waiting, self._on_open = max_waiting, on_open
        self._waiting: deque[Ticket] = deque()
        self._idle: deque[Slot] = deque()
        self._numbers = itertools.count(1)
        self._spaces: dict[bytes, ModelSpace] = {}
        self._closed = False
        rng = rng or random.Random()
        self._slots = [Slot(i, settings, self, random.Random(rng.random())) for i in range(count)]

    def start(self) -> None:
        """Start the processes; returns at once, they are ready when their models are loaded."""
        for slot in self._slots:
            slot.start()

    @property
    def spaces(self) -> dict[bytes, ModelSpace]:
        """Model spaces that are served, by digest."""
        with self._lock:
            return dict(self._spaces)

    def submit(
        self, space: bytes, salt: bytes, tokens: Tokens, first: int, sink: Sink, held: int
    ) -> Callable[[], None] | None:
        """See `ctxreuse.bus.serve_prefill.Prefiller.submit`."""
        ticket = Ticket(Job(next(self._numbers), salt, first, held), tokens, sink)
        with self._lock:
            if self._closed or space not in self._spaces or len(self._waiting) >= self._max_waiting:
                return None
            self._waiting.append(ticket)
        self._dispatch()
        return lambda: self._cancel(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        """Nobody waits for it any more; a call of its sink may be under way."""
        ticket.cancelled = True
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                return
        for slot in self._slots:
            slot.cancel(ticket)

    def rows(self, space: bytes, tokens: Tokens, positions: Tokens) -> Answer:
        """`Engine.first_rows` of some process of this space; the answer raises LinkDownError if there is none."""
        up = [slot for slot in self._slots if slot.can_answer] if space in self.spaces else []
        if not up:
            answer: Answer = Future()
            answer.set_exception(LinkDownError("no engine process computes in this model space"))
            return answer
        # An idle one answers at once, a busy one after its present step.
        slot = min(up, key=lambda slot: slot.state != "idle")
        return slot.ask(next(self._numbers), tokens, positions)

    def settle(self, timeout: float) -> bool:
        """Wait until every process is up or known to be broken; False after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._settled:
            while any(slot.state in ("starting", "restarting") for slot in self._slots):
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return False
                self._settled.wait(left)
        return True

    @property
    def up(self) -> int:
        """Processes that are up."""
        return sum(slot.can_answer for slot in self._slots)

    @property
    def waiting(self) -> int:
        """Jobs that wait for a process."""
        return len(self._waiting)

    def standing(self) -> list[WorkerStanding]:
        """How each process stands."""
        return [slot.standing() for slot in self._slots]

    def close(self) -> None:
        """End the processes; jobs that wait or run end as failed. Idempotent."""
        with self._lock:
            self._closed = True
            left, self._waiting = list(self._waiting), deque()
        for slot in self._slots:
            slot.stop()
        self.settled()
        for slot in self._slots:
            slot.join()
        for ticket in left:
            if not ticket.cancelled:
                ticket.sink.end("the node is stopping")

    # What slots tell.

    def next(self, slot: Slot) -> None:
        """See `slot.Crew`."""
        with self._lock:
            if slot not in self._idle:  # it may have died and come back since
                self._idle.append(slot)
        self._dispatch()

    def settled(self) -> None:
        """See `slot.Crew`."""
        with self._settled:
            self._settled.notify_all()

    def opened(self, space: ModelSpace) -> None:
        """See `slot.Crew`."""
        with self._lock:
            fresh = space.digest not in self._spaces
            self._spaces[space.digest] = space
        if fresh and self._on_open is not None:
            self._on_open(space)

    def failed(self, ticket: Ticket, why: str) -> None:
        """See `slot.Crew`."""
        if ticket.cancelled:
            return
        with self._lock:
            again = ticket.attempts < _ATTEMPTS and not self._closed
            if again:
                self._waiting.appendleft(ticket)
        if again:
            self._dispatch()
        else:
            ticket.sink.end(why)

    def _dispatch(self) -> None:
        while True:
            with self._lock:
                self._idle = deque(slot for slot in self._idle if slot.state == "idle")
                if not self._idle or not self._waiting:
                    return
                slot, ticket = self._idle.popleft(), self._waiting.popleft()
            if not slot.assign(ticket):
                with self._lock:
                    self._waiting.appendleft(ticket)
