"""Decides which tokens may leave a model early, so that no more than a budget of them are other than its own."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

import msgspec

from ctxreuse.exits.ledger import BudgetLedger, check_budget
from ctxreuse.exits.plan import ExitPlan, ExitRow, RampCost
from ctxreuse.exits.records import Records, Thresholds

__all__ = ["MOST_PENDING", "ExitController", "ExitGate", "ExitState"]

#: Tokens that may be unverified at once in one answer: one pass verifies them, and completes their KV.
MOST_PENDING = 8
#: Verified tokens since the start below which nothing leaves, and after how many more thresholds are chosen again.
_KNOWN, _AGAIN = 64, 32
#: All ramps are computed for the first tokens since the start, then for one of each so many.
_LEARNING, _PROBES = 512, 4
#: The share of the budget that thresholds aim at: with all of it, what is spent early keeps more tokens in later.
_AIM = 0.8
#: Callers that have accounts; then those of which nothing is spent go.
_ACCOUNTS = 256


class ExitState(msgspec.Struct, frozen=True, array_like=True):
    """What a controller keeps over restarts. ``accounts``: caller and `BudgetLedger.dump`; ``clean``: nothing was
    taken since."""

    scores: bytes
    right: bytes
    count: int
    accounts: list[tuple[bytes, float, int, list[int]]]
    clean: bool


class _Account:
    """The budget of one caller, and the thresholds that keep it."""

    def __init__(self, ledger: BudgetLedger) -> None:
        self.ledger, self.thresholds = ledger, Thresholds({})
        self.chosen = -_AGAIN  # records when thresholds were chosen


class ExitController:
    """One for a model and its ramps; learns from all answers. Thread-safe; does no input or output.

    What it knows of ramps is that each gives a score, and later whether it was right: it decides as well for whatever
    else is taken on a score and verified afterwards.
    """

    def __init__(self, costs: Sequence[RampCost]) -> None:
        """``costs``: of the ramps, from the first to the last."""
        self.costs = tuple(costs)
        self._lock = threading.Lock()
        self._records = Records(len(self.costs))
        self._accounts = OrderedDict[tuple[bytes, float], _Account]()
        self._fresh = 0  # tokens verified since the start
        self._closed = False
        #: Changes of what is kept.
        self.changes = 0

    def gate(self, caller: bytes, budget: float) -> ExitGate | None:
        """Return what decides for an answer of a caller; ``budget``: the share of tokens that may be wrong.

        None: too many callers have spent some of theirs. Raises ConfigError for a budget that is none.
        """
        key = caller, check_budget(budget)
        with self._lock:
            account = self._accounts.get(key)
            if account is None:
                if len(self._accounts) >= _ACCOUNTS:
                    idle = next((one for one, of in self._accounts.items() if not of.ledger.spent), None)
                    if idle is None:
                        return None
                    del self._accounts[idle]
                account = self._accounts[key] = _Account(BudgetLedger(budget, closed=self._closed))
            self._accounts.move_to_end(key)
        return ExitGate(self, account)

    def plan(self, account: _Account, pending: int) -> tuple[ExitPlan, int, str]:
        """Return what is to be done for the next token while so many are pending; its place in the ledger, if it may
        leave (else -1), and why it may not."""
        with self._lock:
            ledger, records = account.ledger, self._records
            if records.count - account.chosen >= _AGAIN:
                account.thresholds = records.best(self.costs, _AIM * ledger.budget, tuple(account.thresholds.least))
                account.chosen = records.count
            least = account.thresholds.least
            # Ramps are compared on tokens that have the scores of all.
            every = self._fresh < _LEARNING or records.count % _PROBES == 0
            ramps = tuple(range(len(self.costs))) if every else tuple(sorted(least))
            reason = ""
            if self._fresh < _KNOWN:
                reason = "unknown"
            elif not least:
                reason = "worthless"
            elif not ledger.room:
                reason = "spent"
            elif pending >= MOST_PENDING:
                reason = "pending"
            return (ExitPlan(ramps), -1, reason) if reason else (ExitPlan(ramps, least), ledger.take(), "")

    def count(self, account: _Account, place: int) -> None:
        """Note that a token did not leave; ``place``: the one in the ledger that it would have had, or -1."""
        with self._lock:
            self.changes += 1
            if place < 0:
                account.ledger.exact()
            else:
                account.ledger.verify(place)

    def learn(self, account: _Account, rows: Sequence[tuple[ExitRow, int]]) -> None:
        """Learn from tokens that ran through the whole model, each with its place in the ledger if it had left."""
        ramps, nan = range(len(self.costs)), float("nan")
        with self._lock:
            self.changes += 1
            for row, place in rows:
                if row.scores:
                    scores = [row.scores.get(ramp, nan) for ramp in ramps]
                    self._records.add(scores, [row.right.get(ramp, False) for ramp in ramps])
                    self._fresh += 1
                if row.left < 0:
                    continue
                if row.right.get(row.left, False):
                    account.ledger.verify(place)
                else:
                    account.chosen = -_AGAIN  # thresholds are chosen again at once

    def dump(self, *, clean: bool = False) -> ExitState:
        """Return the state, for `restore`; ``clean``: nothing is taken after this."""
        with self._lock:
            accounts = [(caller, *one.ledger.dump()) for (caller, _), one in self._accounts.items()]
            return ExitState(*self._records.dump(), accounts, clean)

    def restore(self, state: ExitState) -> None:
        """Take a state, before anything was taken. One that is not clean may have been spent more of than it says, so
        all budgets begin closed for a window. Raises ValueError for what is no state of these ramps."""
        accounts = {
            (caller, budget): BudgetLedger.restore(budget, tokens, wrong)
            for caller, budget, tokens, wrong in state.accounts
        }
        if len(accounts) > _ACCOUNTS:
            raise ValueError("too many accounts")
        with self._lock:
            self._records.restore(state.scores, state.right, state.count)
            self._closed = not state.clean
            if state.clean:
                self._accounts = OrderedDict((key, _Account(ledger)) for key, ledger in accounts.items())

    def close(self) -> None:
        """Let all budgets begin closed for a window, as what was spent of them is unknown."""
        with self._lock:
            self._closed = True

    def check(self) -> None:
        """Raise AssertionError if a budget is exceeded."""
        with self._lock:
            for account in self._accounts.values():
                account.ledger.check()


class ExitGate:
    """Decides for one answer. One thread at a time.

    Attributes:
        exited, verified, wrong: tokens that left, of these verified, and of these wrong.
        refused: how often a token did not leave, by reason: ``unknown`` (too little was verified since the start),
            ``worthless`` (no ramp saves anything within the budget), ``spent`` (the budget is), ``score`` (no ramp was
            sure enough), ``pending`` (so many were unverified that a full pass was due), and those of `settle`.
    """

    def __init__(self, controller: ExitController, account: _Account) -> None:
        self._controller, self._account = controller, account
        self._places = deque[int]()  # of tokens that left and are not verified
        self._place, self._reason = -1, ""
        self.refused = Counter[str]()
        self.exited = self.verified = self.wrong = 0

    @property
    def waiting(self) -> int:
        """Tokens that left and are not verified."""
        return len(self._places)

    @property
    def budget(self) -> float:
        """The share of tokens that may be wrong."""
        return self._account.ledger.budget

    def plan(self) -> ExitPlan:
        """Return what is to be done for the next token; `settle` it then."""
        plan, self._place, self._reason = self._controller.plan(self._account, len(self._places))
        return plan

    def settle(self, left: int, rows: Sequence[ExitRow], reason: str = "") -> None:
        """Note a step: the ramp at which its token left, -1 if it did not; and the tokens, in their order, that ran
        through the whole model in it. ``reason``: why it could not leave, whatever was planned. Where a step fails
        instead, its token stays counted as wrong."""
        if left >= 0:
            self.exited += 1
            self._places.append(self._place)
        else:
            self.refused[reason or self._reason or "score"] += 1
            self._controller.count(self._account, self._place)
        self._place = -1
        self.complete(rows)

    def complete(self, rows: Sequence[ExitRow]) -> None:
        """Note tokens that ran through the whole model; those that had left are the oldest that were not verified."""
        placed = []
        for row in rows:
            place = -1
            if row.left >= 0:
                place = self._places.popleft()
                self.verified += 1
                self.wrong += not row.right.get(row.left, False)
            placed.append((row, place))
        self._controller.learn(self._account, placed)
