"""A budget of wrong answers that no window of tokens exceeds: what is not verified counts as wrong."""

from __future__ import annotations

from collections import deque
from math import floor, isfinite

from ctxreuse.errors import ConfigError

__all__ = ["WINDOW", "BudgetLedger", "check_budget"]

#: Tokens of the window in which the budget holds.
WINDOW = 500


def check_budget(budget: float) -> float:
    """Return a share of tokens that may be wrong, if it is one. Raises ConfigError."""
    if not (isfinite(budget) and 0 < budget <= 0.2):
        raise ConfigError(f"exits is {budget!r}", fix="It must be off, or a share of tokens up to 0.2, such as 0.01")
    return float(budget)


class BudgetLedger:
    """Counts the tokens of one stream, and those of them that were taken without being verified. Not thread-safe.

    A taken token is wrong until it is verified, and for ever if it never is; one is taken only while the wrong ones in
    the window that it ends are within the budget. So the wrong ones in every window of `WINDOW` tokens are at most
    ``budget`` times as many, and so are those of the stream's first tokens, however few: when the last wrong one of a
    window was taken, all others in the window before it had been counted.
    """

    def __init__(self, budget: float, *, closed: bool = False) -> None:
        """``closed``: what came before is unknown, so that nothing may be taken in the first window."""
        self.budget = check_budget(budget)
        #: Tokens so far.
        self.tokens = 0
        self._wrong = deque[int]()  # positions, ascending
        if closed:
            self.tokens = WINDOW
            self._wrong.extend([WINDOW - 1] * self._allowed())

    def _allowed(self) -> int:
        # Budgets are decimal fractions, and 0.29 * 100 is less than 29.
        return floor(self.budget * min(self.tokens + 1, WINDOW) + 1e-9)

    @property
    def spent(self) -> int:
        """Tokens of the window that ends with the next one that are wrong, or not verified."""
        while self._wrong and self._wrong[0] <= self.tokens - WINDOW:
            self._wrong.popleft()
        return len(self._wrong)

    @property
    def room(self) -> int:
        """How many tokens may be taken now if the first ones are wrong."""
        return max(self._allowed() - self.spent, 0)

    def exact(self) -> None:
        """Count a token that is right."""
        self.tokens += 1

    def take(self) -> int:
        """Count a token that is not verified, where there is `room`; returns its position, for `verify`."""
        assert self.room, "the budget is spent"
        self._wrong.append(self.tokens)
        self.tokens += 1
        return self.tokens - 1

    def verify(self, position: int) -> None:
        """Note that a taken token is right."""
        if position in self._wrong:  # else it is older than the window
            self._wrong.remove(position)

    def dump(self) -> tuple[float, int, list[int]]:
        """Return what `restore` takes."""
        return self.budget, self.tokens, list(self._wrong)

    @classmethod
    def restore(cls, budget: float, tokens: int, wrong: list[int]) -> BudgetLedger:
        """Return the ledger of a `dump`. Raises ValueError for what cannot be one."""
        if not 0 < budget <= 0.2 or tokens < 0 or len(wrong) > WINDOW or wrong != sorted(wrong):
            raise ValueError("no ledger")
        if wrong and not 0 <= wrong[0] <= wrong[-1] < max(tokens, 1):
            raise ValueError("a ledger with positions that it does not have")
        one = cls(budget)
        one.tokens = tokens
        one._wrong.extend(wrong)
        return one

    def check(self) -> None:
        """Raise AssertionError if more is wrong than may be."""
        assert self.spent <= floor(self.budget * WINDOW + 1e-9), "the budget is exceeded"
        assert list(self._wrong) == sorted(self._wrong), "positions are not ascending"
        assert not self._wrong or self._wrong[-1] < self.tokens, "a position is beyond the end"
