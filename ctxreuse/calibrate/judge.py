"""Calibration of a judge: how well a model tells right steps of answers from wrong ones, by what it thinks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ctxreuse.calibrate.gather import Progress
from ctxreuse.codec import model_digest
from ctxreuse.engines.digit import DigitQuestion
from ctxreuse.engines.text import Message
from ctxreuse.errors import ConfigError
from ctxreuse.judge import MAX_STEP, JudgeProfile, LabelledStep, likelihood
from ctxreuse.judge.own import judged_of

if TYPE_CHECKING:
    from ctxreuse.engines.base import Context, Engine, Logits
    from ctxreuse.identity.keys import Tokens

__all__ = ["calibrate_judge"]


def calibrate_judge(
    engine: Engine, steps: Sequence[LabelledStep], progress: Progress, notes: Mapping[str, str]
) -> JudgeProfile:
    """Measure both ways of judging on labelled steps, as they are judged for a peer.

    Raises ConfigError for a model without a tokenizer, and for steps that are too long, or all right or all wrong.
    """
    text = engine.text
    if text is None:
        raise ConfigError("this model has no tokenizer, so no step can be read", fix="Add its tokenizer.json")
    question, scores = DigitQuestion(text), dict[str, list[float]](likelihood=[], digit=[])
    for number, one in enumerate(steps):
        progress("steps", number, len(steps))
        before = text.render([Message("user", one.question)], generate=True)
        prompt = np.concatenate([text.encode(before), text.encode(one.before, markers=False)])
        step = text.encode(f"{one.step}\n\n", markers=False)
        if len(step) > MAX_STEP:
            raise ConfigError(
                f"a labelled step has {len(step)} tokens", where=one.step[:40], fix="At most 128 are judged"
            )
        context = engine.new_context(len(prompt) + len(step) + len(question.ids))
        rows = _logits(engine, context, np.concatenate([prompt, step[:-1]]), len(step))
        digit_row = _logits(engine, context, np.concatenate([step[-1:], question.ids]), 1)
        scores["likelihood"].append(likelihood(rows, step))
        scores["digit"].append(question.score(digit_row[-1]))
    progress("steps", len(steps), len(steps))
    judges = {name: judged_of(steps, found, name) for name, found in scores.items()}
    return JudgeProfile(model_digest(engine.space), judges, dict(notes))


def _logits(engine: Engine, context: Context, tokens: Tokens, rows: int) -> Logits:
    """Append tokens, and return the logits after the last ones, float32 [rows, vocab]."""
    start = context.n
    while True:
        (found,) = engine.step([(context, tokens[context.n - start :])], limit=None, rows=[rows])
        if isinstance(found, Exception):
            raise found
        if found is not None:
            return np.atleast_2d(found)
