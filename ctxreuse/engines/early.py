"""Passes that tokens leave early, whatever engine computes them: ramps, rows that wait for the rest, and who leaves."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ctxreuse.engines.base import Context, Logits
from ctxreuse.engines.exits import ExitStep
from ctxreuse.errors import CtxReuseError, EngineError
from ctxreuse.exits import ExitPlan, ExitRow, RampCost
from ctxreuse.exits.profile import ExitProfile, Ramp
from ctxreuse.identity.keys import Tokens
from ctxreuse.kernels.linear import linear_top

__all__ = ["EarlyContext", "EarlyPasses", "Lane", "PendingRow", "ramp_tops"]


class PendingRow:
    """One token of a context.

    Attributes:
        depth: layers that it ran through; later ones have no K and V of it.
        hidden: its hidden state there, as the engine has it.
        left: the ramp at which it left; -1: it did not.
        ramps: those that are to be computed for it, by number, also after it left.
        scores, tokens: of those that were.
    """

    __slots__ = ("depth", "hidden", "left", "ramps", "scores", "tokens")

    def __init__(self, ramps: Sequence[int]) -> None:
        self.depth, self.left, self.ramps = 0, -1, ramps
        self.hidden: Any = None
        self.scores, self.tokens = dict[int, float](), dict[int, int]()

    def completed(self, token: int) -> ExitRow:
        """Return what became of it: the model says that ``token`` follows."""
        return ExitRow(self.scores, {ramp: said == token for ramp, said in self.tokens.items()}, self.left)


class EarlyContext(Protocol):
    """A context whose last tokens may have left early: ``pending``; ``completed``: what became of those that were
    completed since."""

    pending: list[PendingRow]
    completed: list[ExitRow]

    @property
    def n(self) -> int:
        """Number of tokens processed so far."""
        ...

    def append(self, ids: Tokens) -> None:
        """Count tokens as processed; the layers hold them already, or will."""
        ...


C = TypeVar("C", bound=EarlyContext)


class Lane(Generic[C]):
    """One context in a pass with exits.

    Attributes:
        hidden: of its rows, the ids [n] or hidden states behind the layers so far, [n, …].
        rows: its tokens in the pass, of which the last has position ``last``.
        found: what the pass came to.
    """

    __slots__ = ("context", "found", "hidden", "last", "plan", "rows")

    def __init__(self, context: C, hidden: Any, rows: list[PendingRow], last: int, plan: ExitPlan) -> None:
        self.context, self.hidden, self.rows, self.last, self.plan = context, hidden, rows, last, plan
        self.found = ExitStep(None, -1, -1, ())

    @property
    def first(self) -> int:
        """The position of its first row."""
        return self.last + 1 - len(self.rows)

    def may_leave(self, number: int) -> bool:
        """True if a ramp is sure enough of its last row."""
        least = self.plan.least.get(number)
        return least is not None and self.rows[-1].scores[number] >= least

    def leave(self, number: int, depth: int) -> None:
        """Let its last row leave at a ramp, behind ``depth`` layers; all its rows wait there."""
        row = self.rows[-1]
        for one, hidden in zip(self.rows, self.hidden):
            one.depth, one.hidden = depth, hidden
        row.left = number
        self.context.pending.append(row)
        self.found = ExitStep(None, row.tokens[number], number, ())

    def end(self, logits: Logits) -> None:
        """Note that its rows ran through all layers, with the logits [n, vocab]."""
        self.context.pending = []
        said = logits.argmax(-1).tolist()
        rows = tuple(one.completed(token) for one, token in zip(self.rows, said))
        self.found = ExitStep(logits[-1].copy(), said[-1], -1, rows)


class EarlyPasses(ABC, Generic[C]):
    """The exits of one model. Different contexts from different threads."""

    def __init__(self, profile: ExitProfile, layers: Sequence[int], head: int, row: float) -> None:
        """
        Args:
            profile: its ramps; EngineError if it has none.
            layers, head: bytes of weights of each layer, and of what gives logits: by these a token costs.
            row: what a row of several costs of a pass of one: what a token that left costs later.
        """
        if not profile.ramps or profile.layers != len(layers):
            raise EngineError("the exit profile has no ramps of this model")
        self._ramps, self._count, self._clock = profile.ramps, len(layers), time.perf_counter
        self._parted = 0.0  # what running in parts adds to a pass, as a share of it
        whole = sum(layers) + head
        #: See `ExitEngine.ramps`.
        self.costs = tuple(
            RampCost((1 - row) * (sum(layers[ramp.depth :]) + head) / whole, ramp.head.data.nbytes / whole)
            for ramp in profile.ramps
        )

    @abstractmethod
    def _begun(self, ids: Tokens) -> Any:
        """Ids as `Lane.hidden`."""

    @abstractmethod
    def _stacked(self, hidden: Sequence[Any]) -> Any:
        """Hidden states of single rows as `Lane.hidden`."""

    @abstractmethod
    def _joined(self, before: Any, hidden: Any) -> Any:
        """Rows of two, one after the other."""

    @abstractmethod
    def _advance(self, lanes: Sequence[Lane[C]], at: int, stop: int) -> None:
        """Run layers ``at`` to ``stop`` on the rows of all lanes, and have K and V of them there."""

    @abstractmethod
    def _logits(self, lanes: Sequence[Lane[C]]) -> Sequence[Logits]:
        """Logits [n, vocab] of the rows of each lane, which are behind the last layer."""

    @abstractmethod
    def _tops(self, number: int, lanes: Sequence[Lane[C]], chosen: Sequence[int]) -> tuple[list[float], list[int]]:
        """Of some rows of all lanes, what `ramp_tops` gives for a ramp."""

    def _undone(self, context: C) -> AbstractContextManager[None]:
        """After a failure inside: let a context have what it had."""
        return _rows_undone(context)

    def exit_step(
        self,
        batch: Sequence[tuple[Context, Tokens, ExitPlan]],
        ready: Callable[[Context, Tokens], tuple[C, Tokens] | Logits],
        *,
        together: bool,
    ) -> list[ExitStep | CtxReuseError]:
        """See `ExitEngine.exit_step`.

        Args:
            batch: contexts, one token each, and plans.
            ready: gives the engine's own context, with room for the token, and that; or the logits of a full pass, if
                it can run through all layers only. Raises what `Engine.prefill` does.
            together: whether several contexts go in one pass.
        """
        found, early = dict[int, ExitStep | CtxReuseError](), dict[int, tuple[C, Tokens, ExitPlan]]()
        for i, (context, tokens, plan) in enumerate(batch):
            try:
                one = ready(context, tokens)
                if isinstance(one, tuple):
                    early[i] = *one, plan
                else:
                    found[i] = ExitStep(one, -1, -1, (ExitRow(),))
            except CtxReuseError as error:
                found[i] = error
        if len(early) > 1 and together:
            with suppress(CtxReuseError):  # each finds its own below
                found |= zip(early, self._step(list(early.values())))
        for i in early.keys() - found.keys():
            try:
                (found[i],) = self._step([early[i]])
            except CtxReuseError as error:
                found[i] = error
        for i, step in found.items():
            if isinstance(step, ExitStep):
                own = cast("C", batch[i][0])
                before, own.completed = tuple(own.completed), []
                found[i] = step._replace(rows=before + step.rows)
        return [found[i] for i in range(len(batch))]

    def _step(self, batch: Sequence[tuple[C, Tokens, ExitPlan]]) -> list[ExitStep]:
        """Append one token each; all contexts are as they were if it raises."""
        with ExitStack() as opened:
            lanes = []
            for context, ids, plan in batch:
                opened.enter_context(self._undone(context))
                lanes.append(Lane(context, self._begun(ids), [PendingRow(plan.ramps)], context.n, plan))
            began = self._clock()
            ramps = self._run(lanes, 0)
            spent = ramps + (self._clock() - began - ramps) * self._parted / (1 + self._parted)
            for context, ids, _ in batch:
                context.append(ids)
        return [lane.found._replace(spent=spent) for lane in lanes]

    def complete(self, context: C) -> None:
        """Compute what the last rows of a context miss."""
        depth = context.pending[-1].depth
        rows = [row for row in context.pending if row.depth == depth]
        lane = Lane(context, self._stacked([row.hidden for row in rows]), rows, context.n - 1, ExitPlan())
        with self._undone(context):
            self._run([lane], depth)
        context.completed += lane.found.rows

    def _run(self, lanes: Sequence[Lane[C]], at: int) -> float:
        """Run the rows of several contexts from layer ``at`` on, and from where they wait those before them, up to the
        ramp at which all leave. Returns the seconds of ramps.

        If some left alone, the pass would save their rows and a later one have them: nothing, and their tokens would
        be less sure.
        """
        waiting = [row for lane in lanes for row in lane.context.pending]
        wanted = {number for row in (*waiting, *(lane.rows[-1] for lane in lanes)) for number in row.ramps}
        depths = {self._ramps[number].depth: number for number in wanted}
        stops = {stop for stop in (*depths, *(row.depth for row in waiting)) if stop > at}
        ramps = 0.0
        for stop in sorted(stops | {self._count}):
            self._advance(lanes, at, stop)
            at, number = stop, depths.get(stop, -1)
            if number >= 0:
                began = self._clock()
                self._score(number, lanes)
                ramps += self._clock() - began
                if all(lane.may_leave(number) for lane in lanes):
                    for lane in lanes:
                        lane.leave(number, stop)
                    return ramps
            for lane in lanes:
                self._join(lane, stop)
        for lane, own in zip(lanes, self._logits(lanes)):
            lane.end(own)
        return ramps

    def _join(self, lane: Lane[C], depth: int) -> None:
        """Take along the rows of a context that wait at a depth."""
        joining = [row for row in lane.context.pending if row.depth == depth]
        if joining:
            lane.hidden = self._joined(self._stacked([row.hidden for row in joining]), lane.hidden)
            lane.rows = [*joining, *lane.rows]

    def _score(self, number: int, lanes: Sequence[Lane[C]]) -> None:
        """Compute a ramp for those rows that it is wanted for."""
        rows = [row for lane in lanes for row in lane.rows]
        chosen = [at for at, row in enumerate(rows) if number in row.ramps]
        if not chosen:
            return
        for at, sure, index in zip(chosen, *self._tops(number, lanes, chosen)):
            rows[at].scores[number] = sure  # the log of its probability
            rows[at].tokens[number] = int(self._ramps[number].candidates[index])


def ramp_tops(ramp: Ramp, given: npt.NDArray[np.float32], threads: int) -> tuple[list[float], list[int]]:
    """How sure a ramp is of each row [n, width], as the log of a probability, and of which of its candidates."""
    tops = linear_top(given, ramp.head, threads)
    return (tops["best"] - tops["total"]).tolist(), tops["index"].tolist()


@contextmanager
def _rows_undone(context: EarlyContext) -> Iterator[None]:
    before = [(row, row.depth, row.hidden) for row in context.pending]
    try:
        yield
    except BaseException:
        for row, depth, hidden in before:
            row.depth, row.hidden = depth, hidden
        context.pending = [row for row, _, _ in before]
        raise
