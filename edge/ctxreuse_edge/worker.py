"""Runs requests of the event loop in a few threads, with limits on how many wait that callers share."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from ctxreuse.daemon.middleware import CALLER
from ctxreuse.daemon.openai import ApiError
from ctxreuse.fair import FairQueue, Shares
from ctxreuse.runtime.answers import pieces_in_turn

if TYPE_CHECKING:
    from ctxreuse.engines.generate import GeneratedToken
    from ctxreuse.runtime import Completion

__all__ = ["Making", "Piece", "RequestPool", "RunningAnswer"]

T = TypeVar("T")


#: A piece of the answer with this number.
Piece: TypeAlias = "tuple[int, GeneratedToken]"
#: Begins the answers to a request; calls the function before each long step.
Making: TypeAlias = "Callable[[Callable[[], None]], Sequence[Completion]]"


class _CancelledError(Exception):
    """The answer was cancelled before its first token."""


class RunningAnswer:
    """The answers to a request in the making, often one; iterate over their pieces once, in the event loop that began
    them. ``cancel`` is thread-safe."""

    def __init__(self, make: Making, using: AbstractContextManager[None] | None = None) -> None:
        self._make, self._using, self._loop = make, using or contextlib.nullcontext(), asyncio.get_running_loop()
        # Unbounded, with one entry per token: a slow client does not hold up the engine.
        self._queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        self._cancelled = threading.Event()
        #: When it was requested, in seconds since 1970.
        self.since = time.time()
        #: Empty until the prompt was read.
        self.completions: Sequence[Completion] = ()
        #: Called when it is cancelled.
        self.on_cancel: Callable[[], None] = lambda: None

    def cancel(self) -> None:
        """Stop after the engine's present pass; ends the iteration."""
        self._cancelled.set()
        for completion in self.completions:
            completion.cancel()
        self.on_cancel()
        self._post(None)

    def run(self) -> None:
        """Make the answer; for a thread of the pool."""
        try:
            self._step()
            with self._using:
                self._generate()
        except _CancelledError:
            pass
        except BaseException as error:
            self._post(error)
        finally:
            self._post(None)

    def _generate(self) -> None:
        self._step()
        completions = self.completions = self._make(self._step)
        try:
            for piece in pieces_in_turn(completions) if not self._cancelled.is_set() else ():
                self._post(piece)
                if self._cancelled.is_set():
                    break
        finally:
            for completion in completions:
                completion.close()

    def fail(self, error: BaseException) -> None:
        """End the iteration with an error, in place of `run`. Thread-safe."""
        self._post(error)

    def _step(self) -> None:
        if self._cancelled.is_set():
            raise _CancelledError

    def _post(self, item: Piece | BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


class _Work(NamedTuple):
    run: Callable[[], None]
    refuse: Callable[[BaseException], None]
    background: bool


class RequestPool:
    """Threads for answers and other long work: ``running`` for a caller, twice that for all; ``limit`` run or wait.

    Answers that run share the engine's passes. Callers (API keys, see `CALLER`) have turns and shares: what one sends
    takes neither all threads nor all places from others. Of a caller's own, the more urgent go first, and what is
    background has half of its threads at most. For one event loop; ``close`` may be called from a thread.
    """

    def __init__(self, *, running: int = 4, limit: int = 32) -> None:
        #: Requests of one caller that run at a time.
        self.running = running
        self._threads = ThreadPoolExecutor(2 * running, "ctxreuse-edge")
        self._limit, self._changed = limit, threading.Condition()
        self._waiting = FairQueue[str, _Work](limit)
        self._running, self._background = Shares[str](2 * running), Counter[str]()
        self._closed = False
        #: Those that run now.
        self.answers: set[RunningAnswer] = set()

    @property
    def active(self) -> int:
        """Requests that run or wait."""
        return self._running.taken + self.waiting

    @property
    def waiting(self) -> int:
        """Requests that wait for a thread."""
        return len(self._waiting)

    def begin(
        self,
        make: Making,
        priority: int = 0,
        using: AbstractContextManager[None] | None = None,
        *,
        answers: int = 1,
    ) -> RunningAnswer:
        """Start answers; ``make`` runs in a thread, and calls the function that it is given before each long step: it
        ends there if the client has left. ``using`` is entered before, and left when the answers have ended;
        ``answers``: how many, which the caller's turn is charged for.

        Raises ApiError (429) at the limit, now or from the answer; 503 while draining."""
        running = RunningAnswer(make, using)

        def run() -> None:
            self.answers.add(running)
            try:
                running.run()
            finally:
                self.answers.discard(running)

        caller, work = self._submit(run, running.fail, priority, answers)
        running.on_cancel = lambda: self._give_up(caller, work)
        return running

    async def call(self, work: Callable[[], T], priority: int = 0) -> T:
        """Run ``work`` in a thread. Raises ApiError (429 at the limit, 503 draining), and what ``work`` raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def end(result: T | None, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, error)

        def run() -> None:
            result, failed = None, None
            try:
                result = work()
            except BaseException as error:
                failed = error
            end(result, failed)

        self._submit(run, lambda error: end(None, error), priority)
        return await done

    def _give_up(self, caller: str, work: _Work) -> None:
        """Leave the queue; what runs already stops by itself."""
        with self._changed:
            if self._waiting.remove(caller, work):
                self._changed.notify_all()

    def _submit(
        self, run: Callable[[], None], refuse: Callable[[BaseException], None], priority: int, cost: int = 1
    ) -> tuple[str, _Work]:
        caller, context = CALLER.get(), contextvars.copy_context()  # for the request id in logs
        work = _Work(lambda: context.run(run), refuse, priority > 0)
        with self._changed:
            if self._closed:
                raise ApiError(503, "the daemon is draining", type="server_error", code="draining")
            self._waiting.limit = self._limit - self._running.taken
            displaced = self._waiting.push(caller, work, cost, rank=priority)
            mine = self._running.of(caller) + self._waiting.waiting(caller)
            self._start()
        if displaced is work:
            raise _refusal(mine, self.active, shared=bool(caller))
        if displaced is not None:
            displaced.refuse(_refusal(1, self.active, shared=True))
        return caller, work

    def _start(self) -> None:
        """Run what waits and has a thread. Under the lock."""
        while (found := self._waiting.pop(self._may_start)) is not None:
            caller, work = found
            self._running.take(caller, 1)
            self._background[caller] += work.background
            self._threads.submit(self._run, caller, work)

    def _may_start(self, caller: str) -> bool:
        background = self._waiting.next(caller).background
        return self._running.fits(caller, 1) and not (
            background and self._background[caller] >= max(1, self.running // 2)
        )

    def _run(self, caller: str, work: _Work) -> None:
        try:
            work.run()
        finally:
            with self._changed:
                self._running.give_back(caller, 1)
                self._background[caller] -= work.background
                self._background += Counter()  # forgets those at 0
                self._start()
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for running and waiting requests; cancelled ones end at once."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self.active)
        self._threads.shutdown(wait=True)

    def check(self) -> None:
        """Raise AssertionError if a count is out of range."""
        with self._changed:
            self._running.check()
            assert 0 <= self.active <= self._limit
            assert self._running.taken <= self._running.total


def _refusal(mine: int, active: int, *, shared: bool) -> ApiError:
    """Return the error of a request without a place; ``shared``: its caller has a share, of which ``mine`` are used."""
    text = f"{active} requests run or wait already"
    if shared and mine:
        text = "your other requests take your share of this daemon"
    return ApiError(429, text, type="rate_limit_error", code="too_many_requests", retry_after=1)
