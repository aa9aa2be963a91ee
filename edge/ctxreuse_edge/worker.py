"""From the event loop to the engine: answers are made in a few threads, and no more wait than there is room for."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from ctxreuse.daemon.openai import ApiError

if TYPE_CHECKING:
    from ctxreuse.engines.generate import Piece
    from ctxreuse.runtime import Completion

__all__ = ["Running", "Worker"]

T = TypeVar("T")


class Running:
    """One answer on its way. Iterated once, in the event loop that began it; ``cancel`` from any thread."""

    def __init__(self, make: Callable[[], Completion]) -> None:
        self._make, self._loop = make, asyncio.get_running_loop()
        # At most one entry a token: the engine is free again however slowly the client reads.
        self._queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        self._cancelled = threading.Event()
        self.completion: Completion | None = None

    def cancel(self) -> None:
        """Stop after the token in the making; the iteration ends."""
        self._cancelled.set()
        self._post(None)

    def run(self) -> None:
        """Make the answer; for the worker's thread."""
        try:
            if self._cancelled.is_set():
                return
            completion = self.completion = self._make()
            for piece in completion:
                self._post(piece)
                if self._cancelled.is_set():
                    completion.close()
                    return
        except BaseException as error:
            self._post(error)
        finally:
            self._post(None)

    def _post(self, item: Piece | BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody reads any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


class Worker:
    """``running`` threads for answers and other long work, and room for ``waiting`` of them in all.

    The engine computes one step of one request at a time, so more threads make answers advance side by side, not
    sooner. One event loop calls; ``close`` may be called from a thread.
    """

    def __init__(self, *, running: int = 4, waiting: int = 32) -> None:
        self._threads = ThreadPoolExecutor(running, "ctxreuse-edge")
        self._limit, self._held, self._lock = waiting, 0, threading.Lock()

    @property
    def held(self) -> int:
        """Requests that wait or run."""
        return self._held

    def begin(self, make: Callable[[], Completion]) -> Running:
        """Start an answer; ``make`` runs in a worker's thread. Raises ApiError (503) if too many wait."""
        running = Running(make)
        self._submit(running.run)
        return running

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a worker's thread. Raises ApiError (503) if too many wait, and what ``work`` raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, failed = None, None
            try:
                result = work()
            except BaseException as error:
                failed = error
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, failed)

        self._submit(run)
        return await done

    def _submit(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._held >= self._limit:
                raise ApiError(
                    503,
                    f"{self._held} requests wait or run already",
                    type="server_error",
                    code="too_many_requests",
                    retry_after=1,
                )
            self._held += 1
        context = contextvars.copy_context()  # logs name the request that the work belongs to

        def run() -> None:
            try:
                context.run(work)
            finally:
                with self._lock:
                    self._held -= 1

        try:
            self._threads.submit(run)
        except RuntimeError:
            with self._lock:
                self._held -= 1
            raise ApiError(503, "the daemon is draining", type="server_error", code="draining") from None

    def close(self) -> None:
        """Wait for what runs; what waits still runs too, and sees at once that it was cancelled."""
        self._threads.shutdown(wait=True)

    def check(self) -> None:
        """Raises AssertionError if more is counted than there may be."""
        assert 0 <= self._held <= self._limit
