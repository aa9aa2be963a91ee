"""Who is in the next pass, and how many tokens each may take. Nothing here waits, computes or reads a clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ctxreuse.runtime.steps.order import PrefillOrder, RequestTurn
from ctxreuse.runtime.steps.slices import AIM, LARGEST, UNSEEN, SliceEstimator
from ctxreuse.speculate import PassCosts, PassLoad

if TYPE_CHECKING:
    from ctxreuse.engines.base import Context, Logits
    from ctxreuse.engines.exits import ExitStep
    from ctxreuse.exits import ExitPlan
    from ctxreuse.identity.keys import Tokens

__all__ = ["MOST", "PATIENT", "PassPlanner", "StepStats", "Waiting"]

#: Most contexts in one pass: their K and V are read one by one, so more of them only wait longer.
MOST = 32
#: Seconds after its last token that an answer which has not ended is expected to want another, so that prefills still
#: go in slices. Where they needlessly do, they are slower, and in short passes llama.cpp rounds otherwise.
_DECODES = 0.25
#: Seconds after requests waited together in which others may come at any moment; tokens that a prefill then takes at
#: most at a time, unless more of them take no longer than so many seconds: on two cores llama.cpp computes 128 in half
#: a second, and 5 % slower than 512 at a time; torch in bfloat16 512 in .3 s, and 1.7 times slower 128 at a time.
_OTHERS, PATIENT, _PATIENCE = 30.0, 128, 0.4
#: Tokens that are left of a short prefill, at most: a question, and the block that it continues.
_SHORT = 128
#: Tokens of a prefill that two passes compute.
_BRIEF = 2 * PATIENT


class Waiting:
    """What one context needs next."""

    __slots__ = (
        "context", "done", "error", "load", "logits", "plan", "rows", "seconds", "start", "step", "tokens", "turn",
    )  # fmt: skip

    def __init__(
        self, context: Context, tokens: Tokens, turn: RequestTurn, rows: int = 1, plan: ExitPlan | None = None
    ) -> None:
        self.context, self.tokens, self.turn, self.start = context, tokens, turn, context.n
        self.rows, self.load = rows, PassLoad()
        self.plan = plan if len(tokens) == rows == 1 else None
        self.step: ExitStep | None = None
        self.done, self.seconds = False, 0.0
        self.logits: Logits | None = None
        self.error: Exception | None = None

    def settle(self, result: Logits | Exception | None, seconds: float) -> None:
        """Note how the pass ended for this context."""
        self.done, self.seconds = True, seconds
        if isinstance(result, Exception):
            self.error = result
        else:
            self.logits = result

    @property
    def plain(self) -> bool:
        """True if its pass had all layers for its rows, and for no others."""
        return self.step is None or (self.step.left < 0 and len(self.step.rows) == 1)

    @property
    def decodes(self) -> bool:
        """True if it needs a single token, and maybe a draft checked with it."""
        return len(self.tokens) == 1 or self.rows > 1

    @property
    def returns(self) -> bool:
        """True if another pass is expected to be asked for: after a token that was decoded, and a part of a prefill."""
        return self.error is None and self.decodes == (self.logits is not None)


class StepStats(NamedTuple):
    """Figures of one engine's passes since the start.

    Attributes:
        passes: passes.
        contexts: contexts in them, together.
        stalled: passes that made others' tokens wait longer than `SliceEstimator.stall` allows.
        waiting: contexts that wait for a pass now.
        started: requests that had their first pass, by priority.
        waited: seconds that they had waited for it, by priority.
    """

    passes: int
    contexts: int
    stalled: int
    waiting: int
    started: Mapping[int, int]
    waited: Mapping[int, float]


class PassPlanner:
    """Plans the passes of one engine, and learns from them. Not thread-safe.

    ``least_slice``: see `ctxreuse.engines.base.SlicingEngine`; ``stall``: see `SliceEstimator`.
    """

    def __init__(self, least_slice: int = 1, stall: float = UNSEEN) -> None:
        self._passes = self._contexts = self._stalled = 0
        self._started, self._waited = Counter[int](), defaultdict[int, float](float)
        self._order, self._slices, self.costs = PrefillOrder(), SliceEstimator(least_slice, stall), PassCosts()
        #: Tokens of several prefills in one pass cost such an engine as much as in one each: the first need not wait.
        self._one_prefill = least_slice > 1
        #: When each answer decoded its last token, and whether prefills go in slices because of that.
        self._decoded, self._sliced = dict[RequestTurn, float](), False
        #: When requests last waited together, and tokens of a prefill while others may come.
        self._together, self._patient = -_OTHERS, PATIENT

    def plan(self, waiting: Sequence[Waiting], now: float, *, batches: bool) -> tuple[list[Waiting], int | None]:
        """Choose who is in the next pass, and the most tokens that each may take (None: as the engine likes).

        ``waiting`` are in the order in which they came. All who decode, and a slice of one prefill, or as many whole
        short ones as such a slice may have tokens (only one for a `SlicingEngine`). A slice is as short as those who
        decode need it, see `SliceEstimator`, unless it is of a tenant that had less than theirs and has little to
        compute. An engine that does not batch takes who has waited longest, or the first prefill if that is one.
        """
        decoding = [one for one in waiting if one.decodes]
        self._decoded = {turn: at for turn, at in self._decoded.items() if now - at < _DECODES}
        self._sliced = bool(decoding or self._decoded)
        if len({one.turn for one in waiting} | self._decoded.keys()) > 1:
            self._together = now
        limit = self._patient if now - self._together < _OTHERS else None
        prefills = [one for one in waiting if not one.decodes]
        if self._sliced and not self._outranks(prefills, {one.turn for one in decoding} | self._decoded.keys(), now):
            limit = min(self._slices.tokens(len(decoding)), limit or LARGEST)
        prefills = self._prefills(prefills, now, limit or 0)
        if self._sliced and limit is not None and prefills and AIM * len(prefills[0].tokens) <= limit:
            limit = max(limit, len(prefills[0].tokens))
        if batches:
            if decoding and not self._slices.measured and any(len(one.tokens) > _SHORT for one in prefills):
                prefills = []  # a few passes that only decode, to know how long others may make them
            return [*decoding[: MOST - len(prefills)], *prefills], limit
        return list(waiting[:1]) if waiting[0].decodes else prefills[:1], limit

    def _outranks(self, prefills: Sequence[Waiting], decoding: Collection[RequestTurn], now: float) -> bool:
        """Return True if the next prefill is brief and of a tenant that had less than all those that decode.

        In slices it would take several times as long as alone, for the sake of those who keep the engine busy.
        """
        if not prefills:
            return False
        turn = self._first(prefills, now).turn
        left = sum(len(one.tokens) for one in prefills if one.turn is turn)
        return left <= _BRIEF and self._order.had_less(turn.tenant, {other.tenant for other in decoding})

    def _first(self, prefills: Sequence[Waiting], now: float) -> Waiting:
        short = {one.turn for one in prefills if len(one.tokens) <= _SHORT}
        turn = self._order.first([one.turn for one in prefills], now, short)
        return next(one for one in prefills if one.turn is turn)

    def _prefills(self, prefills: Sequence[Waiting], now: float, limit: int) -> list[Waiting]:
        left, chosen, room = list(prefills), list[Waiting](), limit
        while left:
            first = self._first(left, now)
            if chosen and (len(first.tokens) > min(_SHORT, room) or len(chosen) == MOST):
                break
            chosen.append(first)
            left.remove(first)
            room -= len(first.tokens)
            if room <= 0 or self._one_prefill:
                break
        return chosen

    def done(self, chosen: Sequence[Waiting], seconds: float, now: float) -> None:
        """Learn from a pass that took ``seconds``."""
        prefills = [one for one in chosen if not one.decodes]
        decoding, computed = len(chosen) - len(prefills), 0
        for one in prefills:
            count = one.context.n - one.start
            computed += count
            self._order.charge(one.turn, count, len(one.tokens) - count, short=len(one.tokens) <= _SHORT)
        for turn in (one.turn for one in chosen if not one.turn.started):
            turn.started = True
            self._started[turn.priority] += 1
            self._waited[turn.priority] += now - seconds - turn.since
        self._passes += 1
        self._contexts += len(chosen)
        rows = sum(one.rows for one in chosen if one.decodes)
        for one in chosen:
            one.load = PassLoad(max(decoding - 1, 0), max(rows - decoding - one.rows + 1, 0), prefill=bool(prefills))
        plain = all(one.plain for one in chosen)
        if computed >= PATIENT and not decoding and seconds > 0:
            self._slices.observe_alone(computed, seconds)
            self._patient = max(PATIENT, min(int(_PATIENCE * computed / seconds), LARGEST))
        if decoding and not prefills and plain:
            spent = max((one.step.spent for one in chosen if one.step is not None), default=0.0)
            self.costs.observe(rows, decoding, seconds - spent)
        if decoding:
            self._decoded |= {one.turn: now for one in chosen if one.decodes}
            step = self._slices.step(decoding)
            self._stalled += bool(computed) and step is not None and seconds > self._slices.stall(step)
        if self._sliced and rows == decoding and (computed or not prefills) and plain:
            self._slices.observe(decoding, computed, seconds)

    def end(self, turn: RequestTurn) -> None:
        """Note that an answer wants no more tokens, so that the next prefill need not go in slices for it."""
        self._decoded.pop(turn, None)

    def stats(self, waiting: Sequence[Waiting]) -> StepStats:
        """Return the figures so far."""
        counts = (self._passes, self._contexts, self._stalled, len(waiting))
        return StepStats(*counts, dict(self._started), dict(self._waited))
