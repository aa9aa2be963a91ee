"""How answers are written in steps, from the settings."""

from __future__ import annotations

from typing import Literal

from ctxreuse.config import EdgeConfig
from ctxreuse.errors import ConfigError
from ctxreuse.judge import OwnJudge, StepRule, make_steps, read_steps

__all__ = ["step_rule"]

#: Generated steps that a function is measured on.
_MEASURED = 160


def step_rule(edge: EdgeConfig) -> StepRule:
    """Return the rule of some settings; a judge that is a function is measured now. Raises ConfigError for settings
    without a meaning, and for a judge that is refused."""
    try:
        threshold = float(edge.step_threshold) if edge.step_threshold else None
    except ValueError:
        fix = "Write a number, or nothing for that of the judge's calibration"
        raise ConfigError(f"edge.step_threshold is {edge.step_threshold!r}", fix=fix) from None
    judge: Literal["likelihood", "digit"] | OwnJudge
    if edge.step_judge == "likelihood":
        judge = "likelihood"
    elif edge.step_judge == "digit":
        judge = "digit"
    else:
        steps = read_steps(edge.step_cases) if edge.step_cases else make_steps(_MEASURED)
        judge = OwnJudge.named(edge.step_judge, steps)
    return StepRule(judge=judge, threshold=threshold, tokens=edge.step_tokens)
