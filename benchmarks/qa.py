"""Questions over reused documents: what the gate's settings do to the answer that is known to be right (live).

Each question comes three times behind the document that answers it and four others, in an order in which no earlier
prompt had them. The right answer is fed token by token: how unexpected it is to the model (nats a token), and at how
many of its tokens it was the first choice, after full prefill and at each permission. With CTXREUSE_TRACES: questions
about single facts in chats (LiHua-World), without it about made-up firms. ``--model``: another model than SmolLM2.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.archive import DEFAULT, Archive, an_archive, model_for
from benchmarks.corpus import Question, Questions, facts, questions
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.block.levels import limit_name, limit_of
from ctxreuse.engines.prompt import EncodedPrompt
from ctxreuse.identity.keys import Tokens

if TYPE_CHECKING:
    from ctxreuse.engines.torch_hf.fidelity import Scores

__all__ = ["FULL", "OPTIONS", "Told", "figures", "run"]

OPTIONS = ("model",)
_MODEL = "smollm2"
FULL = "full prefill"
#: Permissions: the usual one, one for answers that hang on single facts, and a coarse one.
_USUAL = limit_name(DEFAULT)
_FINE = "kl-0.025"
_GATES = (_USUAL, _FINE, "kl-0.1")
_QUESTIONS, _DOCUMENTS = 110, 5
#: Prompts of each question: behind other documents, in other orders. One answer's loss hangs on these as well.
_TIMES = 3
#: Percent of the likelihood, and of the tokens, that the usual gate and the fine one may lose.
_LOST = 0.7


class Told(NamedTuple):
    """One right answer under one setting.

    ``tokens``: of the answer; ``nll``: nats a token; ``right``: share of first choices; ``kl``: nats a token against
    full prefill; ``seconds``: to the first logits; ``moved`` of ``prompt`` tokens stood elsewhere before.
    """

    tokens: int
    nll: float
    right: float
    kl: float
    seconds: float
    prompt: int
    moved: int
    gate: str


def run(options: Options) -> list[Figure]:
    """Likelihood and first choices at each setting, and what the usual one loses."""
    engine = model_for(options.model or _MODEL, options)
    asked = facts(6) if options.quick else questions()
    with an_archive(engine, options) as archive:
        counts = options.pick(4, _QUESTIONS), options.pick(3, _DOCUMENTS), options.pick(1, _TIMES)
        told = _told(archive, asked, *counts, options)
    return figures(told, asked.source, bars=asked.real and not options.quick)


def _told(
    archive: Archive, asked: Questions, count: int, taken: int, times: int, options: Options
) -> dict[str, list[Told]]:
    rng = Random(11)
    chosen = _spread(asked.questions, count)
    held = list(dict.fromkeys(question.document for question in chosen))
    for at in range(0, len(held), taken):
        options.step("earlier prompts", at, len(held))
        some = [asked.documents[i] for i in held[at : at + taken]]
        done = archive.ask(archive.encode_prompt(some, "What is this about?"), None).done
        archive.keep(done)
        del done
    told: dict[str, list[Told]] = {name: [] for name in (FULL, *_GATES)}
    for number, question in enumerate(chosen * times):
        options.step("questions", number, len(chosen) * times)
        others = [i for i in held if i != question.document]
        order = [question.document, *rng.sample(others, min(taken - 1, len(others)))]
        rng.shuffle(order)
        prompted = archive.encode_prompt([asked.documents[i] for i in order], question.question)
        answer = archive.text.encode(question.answer, markers=False)
        # The prompt's last token is scored with the answer, whose first token it predicts.
        rest = np.concatenate([prompted.ids[-1:], answer]).astype("<i4")
        shorter = prompted._replace(ids=prompted.ids[:-1])
        exact: Scores | None = None
        for name in told:
            one, scores = _one(archive, shorter, rest, name, exact)
            told[name].append(one)
            exact = exact or scores
    return told


def _spread(asked: Sequence[Question], count: int) -> list[Question]:
    """Evenly over all of them: neighbours are about one document."""
    return list(asked[:: max(1, len(asked) // count)])[:count]


def _one(
    archive: Archive, prompted: EncodedPrompt, rest: Tokens, name: str, exact: Scores | None
) -> tuple[Told, Scores]:
    """One setting's answer, and its scores; ``exact``: those after full prefill."""
    from ctxreuse.engines.torch_hf.context import TorchContext
    from ctxreuse.engines.torch_hf.fidelity import score

    engine, ids = archive.engine, prompted.ids
    if name == FULL:
        context, began = engine.new_context(len(ids) + len(rest)), time.perf_counter()
        engine.prefill(context, ids)
        seconds, moved, gate = time.perf_counter() - began, 0, ""
    else:
        done, seconds = archive.ask(prompted, limit_of(name))
        moved, gate = done.usage.tokens.relocated, done.usage.gate_decision
        assert isinstance(done.context, TorchContext)
        context = done.context
    scores = score(engine, context, rest)
    kl = 0.0 if exact is None else scores.against(exact).kl
    return Told(len(rest) - 1, scores.nll, scores.right, kl, seconds, len(ids), moved, gate), scores


def figures(told: Mapping[str, Sequence[Told]], source: str, *, bars: bool) -> list[Figure]:
    """Each setting against full prefill."""
    full = told[FULL]
    nll, right = _mean(full)
    found = []
    for name, answers in told.items():
        lost, chosen = _mean(answers)
        moved = sum(one.moved for one in answers) / sum(one.prompt for one in answers)
        kl = sum(one.tokens * one.kl for one in answers) / sum(one.tokens for one in answers)
        said = statistics.mode(one.gate for one in answers)
        took, whole = (statistics.median(one.seconds for one in some) for some in (answers, full))
        found.append(
            Figure(
                metric=f"right answer, {name}",
                value=lost,
                unit="nats a token",
                baseline=None if name == FULL else nll,
                better="lower",
                note=f"first choice at {chosen:.1%} of {sum(one.tokens for one in answers)} tokens"
                + (
                    f", {source}"
                    if name == FULL
                    else f", KL {kl:.4f}, {moved:.0%} moved, {took:.2f} s of {whole:.2f} s; {said}; "
                    f"standard error {_errors(answers, full)[0]:.3f}"
                ),
            )
        )
    for name in (_USUAL, _FINE):
        (lost, chosen), (error, wrong) = _mean(told[name]), _errors(told[name], full)
        found += [
            Figure(
                metric=f"likelihood lost at {name}",
                value=100 * (lost - nll) / nll,
                unit="%",
                better="lower",
                bar=_LOST if bars else None,
                note=f"nats of the right answer, above a full prefill's; standard error {100 * error / nll:.2g} %",
            ),
            Figure(
                metric=f"first choices lost at {name}",
                value=100 * (right - chosen),
                unit="% of tokens",
                better="lower",
                bar=_LOST if bars else None,
                note=f"standard error {100 * wrong:.2g} %",
            ),
        ]
    return found


def _mean(told: Sequence[Told]) -> tuple[float, float]:
    """Nats a token and share of first choices, over all tokens of all answers."""
    tokens = sum(one.tokens for one in told)
    return sum(one.tokens * one.nll for one in told) / tokens, sum(one.tokens * one.right for one in told) / tokens


def _errors(told: Sequence[Told], full: Sequence[Told]) -> tuple[float, float]:
    """Standard errors of what both of `_mean` lose, as if these were some questions drawn from many."""
    tokens, (nll, right), (before, chosen) = sum(one.tokens for one in told), _mean(told), _mean(full)
    off = [
        (one.tokens * (one.nll - was.nll - nll + before), one.tokens * (one.right - was.right - right + chosen))
        for one, was in zip(told, full)
    ]
    more = len(told) / max(len(told) - 1, 1)
    first, second = (math.sqrt(more * sum(x * x for x in some)) / tokens for some in zip(*off))
    return first, second
