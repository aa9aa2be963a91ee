"""A function of the user's that judges steps: found by name, and measured before it is trusted."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from ctxreuse.errors import ConfigError
from ctxreuse.judge.cases import LabelledStep
from ctxreuse.judge.profile import Judged
from ctxreuse.judge.scores import area_under_curve, best_threshold

__all__ = ["OwnJudge", "judged_of"]

#: Takes the text before a step, question included, and the step; the more it returns, the better the step.
JudgeFunction = Callable[[str, str], float]


class OwnJudge:
    """A judge that is a function. Thread-safe as far as that is.

    Attributes:
        name: for people; ``judged``: how well it did.
    """

    def __init__(self, function: JudgeFunction, steps: Sequence[LabelledStep], name: str = "") -> None:
        """``steps``: what it is measured on. Raises ConfigError where it is refused, see `Judged.check`, or raises
        itself."""
        self.function, self.name = function, name or getattr(function, "__qualname__", "given")
        self.judged = judged_of(steps, [self(f"{one.question}\n\n{one.before}", one.step) for one in steps], self.name)
        self.judged.check(self.name)

    @classmethod
    def named(cls, name: str, steps: Sequence[LabelledStep]) -> OwnJudge:
        """Return that of a name such as ``package.module:function``. Raises ConfigError."""
        module, _, function = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            fix = "Name a function as package.module:function, in an installed package"
            raise ConfigError(f"there is no judge {name!r}: {error}", fix=fix) from None
        return cls(found, steps, name)

    def __call__(self, before: str, step: str) -> float:
        """Return the score of a step. Raises ConfigError if the function fails."""
        try:
            return float(self.function(before, step))
        except Exception as error:  # it is anybody's
            raise ConfigError(f"the judge {self.name} failed: {type(error).__name__}: {error}") from error


def judged_of(steps: Sequence[LabelledStep], scores: Sequence[float], name: str) -> Judged:
    """Return how well scores tell right steps from wrong ones. Raises ConfigError for steps of one kind only."""
    right = [one.right for one in steps]
    if all(right) or not any(right):
        raise ConfigError(
            f"the judge {name} cannot be measured: all labelled steps are {'right' if any(right) else 'wrong'}",
            fix="Label right and wrong steps, some dozens of each",
        )
    tasks = dict[str, float]()
    for kind in sorted({one.kind for one in steps}):
        of = [(score, one.right) for score, one in zip(scores, steps) if one.kind == kind]
        if len({label for _, label in of}) == 2:
            tasks[kind or "all"] = area_under_curve(*zip(*of))
    return Judged(area_under_curve(scores, right), best_threshold(scores, right), len(steps), tasks)
