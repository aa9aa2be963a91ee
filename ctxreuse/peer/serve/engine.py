"""Prefills with an engine of this process: a loop that seals blocks, and a thread that runs it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import CtxReuseError, FormatError, StoreError
from ctxreuse.fair import FairQueue
from ctxreuse.identity.keys import ROOT, Tokens, prefix_keys
from ctxreuse.identity.model import ModelSpace
from ctxreuse.peer.serve.prefill import DISPLACED

if TYPE_CHECKING:
    from ctxreuse.engines.base import Context, Engine
    from ctxreuse.peer.serve.prefill import PrefillSink
    from ctxreuse.store.base import Store

__all__ = ["BURST", "EnginePrefiller", "Made", "compute_blocks", "resume_stored"]

log = logging.getLogger(__name__)

#: Blocks a step: 256 tokens keep the matrices large, and the first blocks come early.
_STEP = 4
#: Tokens that are computed for a tenant that comes back before it takes turns with those that compute all the time.
BURST = 2048


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
    audited: int | None = None,
) -> Generator[Made, None, None]:
    """Compute ``tokens`` and yield the sealed blocks from ``first`` on, then the state where the space needs it.

    Stop iterating to give up. Raises EngineError and its kinds.

    Args:
        engine: Computes.
        salt: Of the keys.
        tokens: int32 [n x block_tokens].
        first: First block to yield.
        step: Blocks computed at a time.
        store: Where leading blocks may be read that then need no computing.
        audited: Only so many of those may be used (None: all).
    """
    space = engine.space
    size, n = space.block_tokens, len(tokens) // space.block_tokens
    keys = prefix_keys(space.digest, salt, tokens, size)
    if store is not None:
        context = resume_stored(engine, keys[:audited], tokens, store, len(tokens))
    else:
        context = engine.new_context(n * size)
    done = min(first, context.n // size)
    while done < n:
        # What was loaded can go out at once.
        stop = context.n // size if context.n > done * size else min(done + step, n)
        if context.n < stop * size:
            engine.prefill(context, tokens[context.n : stop * size])
        start = max(done, first)
        if start < stop:
            parent = keys[start - 1] if start else ROOT
            for number, data in enumerate(engine.export(context, keys[start:stop], parent, start), start):
                yield Made(number, "block", data)
        done = stop
    if space.needs_state:
        parent = keys[n - 2] if n > 1 else ROOT
        yield Made(n - 1, "state", engine.export_state(context, keys[n - 1], parent, n * size))


def resume_stored(engine: Engine, keys: Sequence[bytes], tokens: Tokens, store: Store, reserve: int) -> Context:
    """Return a context with the leading blocks of ``keys`` that are stored, but not the last of ``tokens``.

    ``reserve``: tokens that it has room for. Blocks that cannot be used count as missing.
    """
    space, size = engine.space, engine.space.block_tokens
    context = engine.new_context(reserve)
    try:
        found = store.match(keys[: (len(tokens) - 1) // size])
        count = found.state_blocks if space.needs_state else found.blocks
        with store.read() as reader:
            views, state = [], None
            for i in range(count):
                view = reader.block(keys[i], tokens[i * size : (i + 1) * size], space.digest)
                if view is None:
                    break
                views.append(view)
            if space.needs_state and count:
                state = reader.state(keys[count - 1], tokens[(count - 1) * size : count * size], space.digest)
            if len(views) == count and count and (state is not None or not space.needs_state):
                engine.load(context, views, state).wait()
            views.clear()
            del state
    except (FormatError, StoreError) as error:
        log.warning("stored blocks cannot be used and are computed again: %s", error)
        return engine.new_context(reserve)
    return context


class _Job(NamedTuple):
    salt: bytes
    tokens: Tokens
    first: int
    sink: PrefillSink
    audited: int
    given_up: threading.Event


class EnginePrefiller:
    """A `Prefiller` over one engine, in one thread; at most ``waiting`` jobs wait, tenants in turn. Close it."""

    def __init__(
        self,
        engine: Engine,
        *,
        store: Store | None = None,
        waiting: int = 16,
    ) -> None:
        self._engine, self._store = engine, store
        self._jobs = FairQueue[bytes, _Job](waiting, BURST)
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctxreuse-prefill", daemon=True)
        self._thread.start()

    @property
    def spaces(self) -> Mapping[bytes, ModelSpace]:
        """See `Prefiller.spaces`."""
        return {} if self._closed.is_set() else {self._engine.space.digest: self._engine.space}

    def submit(
        self, space: bytes, salt: bytes, tokens: Tokens, first: int, sink: PrefillSink, audited: int
    ) -> Callable[[], None] | None:
        """See `Prefiller.submit`."""
        job = _Job(salt, tokens, first, sink, audited, threading.Event())
        with self._changed:
            if space not in self.spaces:
                return None
            displaced = self._jobs.push(salt, job, len(tokens) - audited * self._engine.space.block_tokens)
            self._changed.notify()
        if displaced is job:
            return None
        if displaced is not None:
            displaced.sink.end(DISPLACED)
        return job.given_up.set

    @property
    def waiting(self) -> int:
        """Number of jobs that wait."""
        return len(self._jobs)

    def close(self) -> None:
        """Give up all jobs and end the thread. Idempotent."""
        with self._changed:
            self._closed.set()
            left = self._jobs.clear()
            self._changed.notify()
        self._thread.join()
        for job in left:
            job.sink.end("closed")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed.is_set() or self._jobs)
                found = self._jobs.pop()
            if found is None:
                return
            found[1].sink.end(self._make(found[1]))

    def _make(self, job: _Job) -> str:
        making = compute_blocks(self._engine, job.salt, job.tokens, job.first, store=self._store, audited=job.audited)
        try:
            while True:
                if job.given_up.is_set() or self._closed.is_set():
                    return "given up"
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
