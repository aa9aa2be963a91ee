"""Prefilling with an engine of this process: a loop that makes sealed blocks, and a thread that runs it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import CtxReuseError, FormatError, StoreError
from ctxreuse.keys import ROOT, Tokens, prefix_keys
from ctxreuse.model import ModelSpace

if TYPE_CHECKING:
    from ctxreuse.bus.serve_prefill import Sink
    from ctxreuse.engines.base import Engine, Live
    from ctxreuse.store.base import Store

__all__ = ["EnginePrefiller", "Made", "compute_blocks"]

log = logging.getLogger(__name__)

#: Blocks a step: 256 tokens keep the matrices large, and the first blocks come early.
_STEP = 4


class Made(NamedTuple):
    """Block ``number`` of the context, or the state at its end."""

    number: int
    kind: str
    data: npt.NDArray[np.uint8]


def compute_blocks(
    engine: Engine,
    salt: bytes,
    tokens: Tokens,
    first: int,
    *,
    step: int = _STEP,
    store: Store | None = None,
    held: int | None = None,
) -> Generator[Made, None, None]:
    """Compute ``tokens`` int32 [n x block_tokens] and yield the sealed blocks from ``first`` on, ascending, as they are
    made, ``step`` blocks at a time; at the end the state, where the space needs it.

    ``store``: where leading blocks under the same keys may lie that then need no computing; only the first ``held`` of
    them are trusted (None: all). Stop iterating to give up.
    Raises EngineError and its kinds.
    """
    space = engine.space
    size, n = space.block_tokens, len(tokens) // space.block_tokens
    keys = prefix_keys(space.digest, salt, tokens, size)
    live = _resumed(engine, keys[:held], tokens, store) if store is not None else engine.start(n * size)
    done = min(first, live.n // size)
    while done < n:
        # What was loaded can go out at once.
        stop = live.n // size if live.n > done * size else min(done + step, n)
        if live.n < stop * size:
            engine.prefill(live, tokens[live.n : stop * size])
        start = max(done, first)
        if start < stop:
            parent = keys[start - 1] if start else ROOT
            for number, data in enumerate(engine.export(live, keys[start:stop], parent, start), start):
                yield Made(number, "block", data)
        done = stop
    if space.needs_state:
        parent = keys[n - 2] if n > 1 else ROOT
        yield Made(n - 1, "state", engine.export_state(live, keys[n - 1], parent, n * size))


def _resumed(engine: Engine, keys: Sequence[bytes], tokens: Tokens, store: Store) -> Live:
    """A context with as many leading blocks of ``keys`` as the store holds, but not the last of the ``tokens``."""
    space, size = engine.space, engine.space.block_tokens
    live = engine.start(len(tokens))
    try:
        found = store.match(keys[: len(tokens) // size - 1])
        held = found.state_blocks if space.needs_state else found.blocks
        with store.read() as reader:
            views, state = [], None
            for i in range(held):
                view = reader.block(keys[i], tokens[i * size : (i + 1) * size], space.digest)
                if view is None:
                    break
                views.append(view)
            if space.needs_state and held:
                state = reader.state(keys[held - 1], tokens[(held - 1) * size : held * size], space.digest)
            if len(views) == held and held and (state is not None or not space.needs_state):
                engine.load(live, views, state).wait()
            views.clear()
            del state
    except (FormatError, StoreError) as error:
        log.warning("held blocks are computed again: %s", error)
        return engine.start(len(tokens))
    return live


class _Job(NamedTuple):
    salt: bytes
    tokens: Tokens
    first: int
    sink: Sink
    held: int
    given_up: threading.Event


class EnginePrefiller:
    """A `Prefiller` over one engine, in one thread; at most ``waiting`` jobs wait. Close it.

    ``compute`` is held for each step, for an engine that others use too (`Runtime.compute`).
    """

    def __init__(
        self,
        engine: Engine,
        *,
        store: Store | None = None,
        waiting: int = 16,
        step: int = _STEP,
        compute: threading.Lock | None = None,
    ) -> None:
        self._engine, self._store, self._step = engine, store, step
        self._compute = compute or threading.Lock()
        self._jobs: queue.Queue[_Job | None] = queue.Queue(waiting)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctxreuse-prefill", daemon=True)
        self._thread.start()

    @property
    def spaces(self) -> Mapping[bytes, ModelSpace]:
        """See `Prefiller.spaces`."""
        return {} if self._closed.is_set() else {self._engine.space.digest: self._engine.space}

    def submit(
        self, space: bytes, salt: bytes, tokens: Tokens, first: int, sink: Sink, held: int
    ) -> Callable[[], None] | None:
        """See `Prefiller.submit`."""
        job = _Job(salt, tokens, first, sink, held, threading.Event())
        if space not in self.spaces:
            return None
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return None
        return job.given_up.set

    def close(self) -> None:
        """Give up all jobs and end the thread. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            while True:
                try:
                    self._jobs.put_nowait(None)
                    break
                except queue.Full:
                    self._drop_one()
            self._thread.join()
        while self._drop_one():
            pass

    def _drop_one(self) -> bool:
        try:
            job = self._jobs.get_nowait()
        except queue.Empty:
            return False
        if job is not None:
            job.sink.end("closed")
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.sink.end(self._make(job))

    def _make(self, job: _Job) -> str:
        making = compute_blocks(
            self._engine, job.salt, job.tokens, job.first, step=self._step, store=self._store, held=job.held
        )
        try:
            while True:
                if job.given_up.is_set() or self._closed.is_set():
                    return "given up"
                with self._compute:
                    made = next(making, None)
                if made is None:
                    return ""
                if made.kind == "state":
                    job.sink.state(made.data)
                else:
                    job.sink.block(made.number, made.data)
        except CtxReuseError as error:
            return error.what
        except Exception:
            log.exception("a prefill for a peer failed")
            return "failed"
        finally:
            making.close()
