"""Shares one engine between requests: tokens of several contexts go through the model in one pass.

Each thread brings what its context needs next and waits; one of the waiting threads runs the next pass for all of them.
So there is no thread beside theirs, and a single caller runs its passes itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ctxreuse.engines.base import SlicingEngine
from ctxreuse.engines.exits import ExitEngine
from ctxreuse.errors import CtxReuseError, EngineError
from ctxreuse.exits import ExitPlan
from ctxreuse.runtime.steps.order import NORMAL, RequestTurn
from ctxreuse.runtime.steps.passes import PassPlanner, StepStats, Waiting
from ctxreuse.runtime.steps.slices import UNSEEN
from ctxreuse.speculate import PassCosts, PassLoad

if TYPE_CHECKING:
    from ctxreuse.engines.base import Context, Engine, Logits
    from ctxreuse.engines.exits import ExitStep
    from ctxreuse.identity.keys import Tokens

__all__ = ["Advanced", "StepScheduler"]

#: Those who decode come back as soon as they have sampled, and slices of a prompt at once; a pass waits for them this
#: share of a pass, at most so long.
_GATHER, _LONGEST = 0.25, 0.05
#: The turn of those who say nothing.
_NORMAL = RequestTurn()
_NORMAL.started = True


class Advanced(NamedTuple):
    """Logits after the last token, None if some are left, the seconds of the passes that computed it, and what the
    last one held beside it; ``step``: what became of a token that could leave early."""

    logits: Logits | None
    seconds: float
    load: PassLoad = PassLoad()
    step: ExitStep | None = None


class StepScheduler:
    """The passes of one engine. Any thread may call; a context is used by one caller at a time.

    ``exclusive`` is a context manager for other heavy work on the engine, such as recomputing rows: no pass runs then.
    """

    def __init__(
        self, engine: Engine, *, stall: float = UNSEEN, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``stall``: see `SliceEstimator`."""
        self._engine, self.clock = engine, clock
        self._change = threading.Condition()
        self._planner = PassPlanner(engine.least_slice if isinstance(engine, SlicingEngine) else 1, stall)
        self._waiting: list[Waiting] = []
        self._busy = False
        #: Contexts of the last pass that need more and have not come back, and whose they are.
        self._expected: dict[int, RequestTurn] = {}
        self._last = 0.0
        self._exclusive = 0  # callers that wait for the engine alone
        self._pass_first = False  # it was used alone, and a pass is next
        self._number = 0

    def stats(self) -> StepStats:
        """Return what the passes so far were, and who waits now."""
        with self._change:
            return self._planner.stats(self._waiting)

    @property
    def costs(self) -> PassCosts:
        """What passes cost, as measured."""
        return self._planner.costs

    def turn(self, *, priority: int = NORMAL, tenant: str = "", session: str = "") -> RequestTurn:
        """Return the turn of a request that comes now."""
        with self._change:
            self._number += 1
            return RequestTurn(self._number, self.clock(), priority=priority, tenant=tenant, session=session)

    def cancel(self, turn: RequestTurn) -> None:
        """End the request of ``turn`` before its next pass: its thread gets RequestCancelledError."""
        with self._change:
            turn.cancelled = True
            self._change.notify_all()

    def end(self, turn: RequestTurn) -> None:
        """Note that the request of ``turn`` computes no more, so that no pass waits for it."""
        with self._change:
            self._planner.end(turn)
            self._expected = {number: other for number, other in self._expected.items() if other is not turn}
            self._change.notify_all()

    def step(self, context: Context, tokens: Tokens, turn: RequestTurn = _NORMAL) -> Advanced:
        """Append to a context, beside what others need, as many of ``tokens`` (one or more) as one pass takes.

        No other thread uses the context meanwhile. Raises what `Engine.prefill` raises, and RequestCancelledError.
        """
        one = Waiting(context, tokens, turn)
        self._wait([one])
        if one.error is not None:
            raise one.error
        return Advanced(one.logits, one.seconds)

    def advance(self, context: Context, tokens: Tokens, turn: RequestTurn = _NORMAL) -> tuple[Logits, float]:
        """Append all of ``tokens``, see `step`; returns the logits after the last one, and the passes' seconds."""
        start, seconds = context.n, 0.0
        while True:
            done = self.step(context, tokens[context.n - start :], turn)
            seconds += done.seconds
            if done.logits is not None:
                return done.logits, seconds

    def advance_all(
        self,
        batch: Sequence[tuple[Context, Tokens]],
        turn: RequestTurn = _NORMAL,
        rows: Sequence[int] = (),
        plans: Sequence[ExitPlan | None] = (),
    ) -> list[Advanced | Exception]:
        """Append to several contexts of one request, see `advance`, in common passes; an error harms no other.

        ``rows``: see `Engine.step`; ``plans``: of those contexts' tokens that may leave early, where the pass has only
        single tokens.
        """
        left = {i: (context, tokens) for i, (context, tokens) in enumerate(batch)}
        found: dict[int, Advanced | Exception] = {}
        seconds = [0.0] * len(batch)
        while left:
            ones = {
                i: Waiting(*one, turn, rows[i] if rows else 1, plans[i] if plans else None) for i, one in left.items()
            }
            self._wait(list(ones.values()))
            for i, one in ones.items():
                seconds[i] += one.seconds
                if one.error is not None:
                    found[i] = one.error
                elif one.step is not None or one.logits is not None:
                    found[i] = Advanced(one.logits, seconds[i], one.load, one.step)
            left = {
                i: (one.context, one.tokens[one.context.n - one.start :]) for i, one in ones.items() if i not in found
            }
        return [found[i] for i in range(len(batch))]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Use the engine alone. Passes and exclusive uses take turns where both wait."""
        with self._change:
            self._exclusive += 1
            try:
                while self._busy or (self._pass_first and self._waiting):
                    self._change.wait()
                self._busy = True
            finally:
                self._exclusive -= 1
        try:
            yield
        finally:
            with self._change:
                self._busy, self._pass_first = False, True
                self._change.notify_all()

    def _wait(self, ones: Sequence[Waiting]) -> None:
        with self._change:
            self._waiting += ones
            for one in ones:
                self._expected.pop(id(one.context), None)
            self._change.notify_all()
            try:
                while not all(one.done for one in ones):
                    if all(one.done or one in self._waiting for one in ones):  # else a pass computes them
                        ones[0].turn.check()
                    if self._busy or (self._exclusive and not self._pass_first):
                        self._change.wait()
                        continue
                    self._busy = True
                    try:
                        self._gather()
                        self._pass()
                    finally:
                        self._busy = self._pass_first = False
                        self._change.notify_all()
            finally:
                self._waiting = [one for one in self._waiting if one not in ones]  # cancelled or interrupted

    def _gather(self) -> None:
        """Wait a little for those of the last pass: one pass for all is cheaper than two."""
        end = time.monotonic() + min(_GATHER * self._last, _LONGEST)
        while self._expected and (left := end - time.monotonic()) > 0:
            self._change.wait(left)
        self._expected.clear()

    def _pass(self) -> None:
        """Run one pass; the lock is held, and released meanwhile."""
        batches = len(self._waiting) > 1 and self._engine.batches
        chosen, limit = self._planner.plan(self._waiting, self.clock(), batches=batches)
        for one in chosen:
            self._waiting.remove(one)
        self._change.release()
        began = self.clock()
        try:
            found = self._run(chosen, limit)
        except BaseException as error:
            self._change.acquire()
            self._recover(chosen, error)
            raise
        self._change.acquire()
        now = self.clock()
        self._last = now - began
        self._planner.done(chosen, self._last, now)
        for one, result in zip(chosen, found):
            one.settle(result, self._last)
        self._expected = {id(one.context): one.turn for one in chosen if one.returns and batches}

    def _run(self, chosen: Sequence[Waiting], limit: int | None) -> Sequence[Logits | CtxReuseError | None]:
        single = all(len(one.tokens) == one.rows == 1 for one in chosen)
        if not single or all(one.plan is None for one in chosen):
            batch, rows = [(one.context, one.tokens) for one in chosen], [one.rows for one in chosen]
            return self._engine.step(batch, limit=limit, rows=rows)
        assert isinstance(self._engine, ExitEngine)
        found: list[Logits | CtxReuseError | None] = []
        planned = [(one.context, one.tokens, one.plan or ExitPlan()) for one in chosen]
        for one, step in zip(chosen, self._engine.exit_step(planned)):
            if isinstance(step, CtxReuseError):
                found.append(step)
            else:
                one.step = step
                found.append(step.logits)
        return found

    def _recover(self, chosen: Sequence[Waiting], error: BaseException) -> None:
        """This thread was interrupted in a pass that was for others too: they try again, if they can."""
        for one in chosen:
            if one.context.n == one.start:
                self._waiting.append(one)
            else:
                one.settle(EngineError(f"the pass was interrupted: {type(error).__name__}", fix="Ask again"), 0.0)
