"""An edge writes reasoning steps and a cloud's model judges them: accounting, how far judges can be trusted, and time.

The edge is this process, the cloud one of its own with one engine process (one thread each), over a link of 20 ms.

- ``accounted``: share of answers by scripted judges (accept all, none, every other, by chance) whose usage says of each
  step what the script said, and whose tokens are those of both sides, counted apart from the usage.
- ``auc``: how often a judge puts a right step above a wrong one, on generated sums and lists (by task and together), by
  model and way of judging; baseline: chance. Models that are not on this machine are left out. ``refused``: share of
  the judges under .7 that the calibration refuses.
- ``seconds``, ``cloud_tokens``: answers to other generated questions in steps, judged by likelihood with the threshold
  of a calibration on the same kind of task, by task: seconds against the cloud's model alone over the same link, and
  the share of tokens that the cloud wrote; peer: the edge alone; bound: with the same shares and the passes' times.
  Both sides have one model here, so there is no larger one whose tokens could be saved: what is measured is what
  judging costs, not what a better pair gains.

``--model``: another known name for both sides.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.verifying_cloud import linked, verifying_cloud
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.calibrate.judge import calibrate_judge
from ctxreuse.engines import open_engine
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.text import Message
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.judge import (
    LEAST_AUC,
    Judged,
    JudgeProfile,
    JudgeProfileStore,
    LabelledStep,
    OwnJudge,
    StepRule,
    make_steps,
)
from ctxreuse.models.cache import ls
from ctxreuse.peer.fetch.verifiers import CloudVerifiers
from ctxreuse.runtime import Runtime, Usage

__all__ = ["OPTIONS", "run"]

OPTIONS = ("model",)
_MODELS = ("smollm2", "gemma3-270m")
_RTT = 0.020
_LABELLED, _ASKED, _ANSWER = 160, 4, 64


class Answered(NamedTuple):
    """Seconds of an answer, what it used, and its tokens."""

    seconds: float
    usage: Usage
    tokens: tuple[int, ...]


def _answered(runtime: Runtime, question: str, count: int, verify: str) -> Answered:
    text = runtime.text
    assert text is not None
    ids = text.encode(text.render([Message("user", question)], generate=True))
    began = time.perf_counter()
    answer = runtime.complete(ids, SamplingParams(max_tokens=count, ignore_eos=True, verify=verify, speculate="off"))  # type: ignore[arg-type]
    answer.drain()
    return Answered(time.perf_counter() - began, answer.usage, tuple(answer.tokens))


def _questions(task: str, count: int) -> list[str]:
    """Questions that no judge was calibrated on."""
    found = dict.fromkeys(one.question for one in make_steps(8 * count, seed=77) if one.kind == task)
    return list(found)[:count]


def run(options: Options) -> list[Figure]:
    """Accounting, areas under the curve by model, judge and task, seconds and the cloud's share of tokens by task."""
    model = options.model or "smollm2"
    labelled = make_steps(options.pick(24, _LABELLED))
    with tempfile.TemporaryDirectory() as folder:
        cards = str(Path(folder) / "cards")
        own, os.environ["CTXREUSE_CARDS"] = os.environ.get("CTXREUSE_CARDS"), cards
        try:
            figures, profile = _trust(model, labelled, options)
            with verifying_cloud(folder, model) as cloud:
                engine = open_engine(model, threads=1)
                with linked(engine, cloud.said, _RTT) as (runtime, verifiers):
                    figures.insert(0, _accounting(runtime, verifiers, options))
                    runtime.let_verify(verifiers, StepRule(tokens=32))
                    for task in options.pick(("arithmetic",), ("arithmetic", "extraction")):
                        figures += _times(runtime, profile, task, options)
        finally:
            os.environ.pop("CTXREUSE_CARDS")
            if own is not None:
                os.environ["CTXREUSE_CARDS"] = own
    return figures


def _trust(model: str, labelled: Sequence[LabelledStep], options: Options) -> tuple[list[Figure], JudgeProfile]:
    """The judges of all models that are here; the profile is that of ``model``."""
    figures, under, refused = list[Figure](), 0, 0
    here = {one.entry.name for one in ls() if one.gguf is not None or one.record is not None}
    profiles = dict[str, JudgeProfile]()
    for name in options.pick((model,), tuple(dict.fromkeys((model, *_MODELS)))):
        if name != model and name not in here:
            continue
        with_text = open_engine(name, threads=1)
        profiles[name] = profile = calibrate_judge(with_text, labelled, options.step, {"model": name})
        for way, judged in profile.judges.items():
            tasks = ", ".join(f"{task} {auc:.3f}" for task, auc in judged.tasks.items())
            note = f"{judged.steps} steps; {tasks}; {'trusted' if judged.auc >= LEAST_AUC else 'refused'}"
            figures.append(
                Figure(metric=f"auc_{name}_{way}", value=judged.auc, unit="share", baseline=0.5, bound=1.0, note=note)
            )
            if judged.auc < LEAST_AUC:
                under += 1
                try:
                    judged.check(way)
                except ConfigError:
                    refused += 1
    share = refused / under if under else 1.0
    figures.append(
        Figure(
            metric="refused", value=share, unit="share", bar=1.0, note=f"{refused} of {under} judges under {LEAST_AUC}"
        )
    )
    return figures, profiles[model]


def _accounting(runtime: Runtime, verifiers: CloudVerifiers, options: Options) -> Figure:
    """Answers by scripted judges, and whether all of each is accounted for."""
    rng, right, total, steps = random.Random(5), 0, 0, 0
    scripts: dict[str, Callable[[int], bool]] = {
        "all": lambda at: True,
        "none": lambda at: False,
        "every other": lambda at: at % 2 == 0,
        "by chance": lambda at: rng.random() < 0.5,
    }
    for script in scripts.values():
        for number, question in enumerate(_questions("arithmetic", options.pick(1, 3))):
            options.step("accounting", total, 4 * options.pick(1, 3))
            said = list[bool]()
            judge = _scripted(script, said)
            runtime.let_verify(verifiers, StepRule(judge=judge, tokens=8 + number))
            answer = _answered(runtime, question, options.pick(16, _ANSWER), "steps")
            if answer.usage.verification != "steps":  # the machine is too busy for the link's patience
                raise EngineError("an answer of the bench was not judged to its end", where=answer.usage.verification)
            right += _adds_up(answer, said)
            total, steps = total + 1, steps + len(said)
    return Figure(
        metric="accounted",
        value=right / total,
        unit="share",
        bar=1.0,
        note=f"{right} of {total} answers, {steps} steps",
    )


def _scripted(script: Callable[[int], bool], said: list[bool]) -> OwnJudge:
    """A judge that says what a script says; of labelled steps, on which it is measured, the truth."""
    labelled = make_steps(20)
    truth = {one.step: one.right for one in labelled}
    measured = itertools.count()

    def judge(before: str, step: str) -> float:
        if next(measured) < len(labelled):
            return float(truth[step])
        said.append(script(len(said)))
        return float(said[-1])

    return OwnJudge(judge, labelled, "scripted")


def _adds_up(answer: Answered, said: Sequence[bool]) -> bool:
    """True if usage is what the script said, and the tokens of both sides are those of the answer, in its order."""
    steps = answer.usage.steps
    kept = [one.drafted if one.accepted else one.rewritten for one in steps]
    parts, at = list[int](), 0
    for count in kept:
        parts += answer.tokens[at : at + count]
        at += count
    return (
        [one.accepted for one in steps] == list(said)
        and [one.score for one in steps] == [float(one) for one in said]
        and tuple(parts) == answer.tokens
        and answer.usage.tokens.verified == sum(one.rewritten for one in steps)
        and all(one.accepted == (one.rewritten == 0) for one in steps)
    )


def _times(runtime: Runtime, profile: JudgeProfile, task: str, options: Options) -> list[Figure]:
    """Seconds and shares of one kind of task, judged with the threshold that suits it."""
    own = calibrate_judge(
        runtime.engine,
        [one for one in make_steps(options.pick(24, _LABELLED), seed=3) if one.kind == task],
        options.step,
        profile.notes,
    )
    trusted = own.judges["likelihood"]
    judges = {"likelihood": trusted}
    if trusted.auc < LEAST_AUC:  # measured all the same, with its own threshold, as if it were trusted
        judges = {"likelihood": Judged(LEAST_AUC, trusted.threshold, trusted.steps)}
    JudgeProfileStore().add(JudgeProfile(profile.model, judges, profile.notes))
    found = dict[str, list[Answered]](steps=[], auto=[], off=[])
    questions, count = _questions(task, options.pick(1, _ASKED)), options.pick(16, _ANSWER)
    for number, question in enumerate(questions):
        for way in sorted(found, reverse=bool(number % 2)):
            options.step(task, number, len(questions))
            found[way].append(_answered(runtime, question, count, way))
    for way, verification in (("steps", "steps"), ("auto", "cloud"), ("off", "off")):
        if any(one.usage.verification != verification for one in found[way]):
            raise EngineError("an answer of the bench was not given as it should be", where=task)
    ratio = statistics.median(cloud.seconds / ours.seconds for ours, cloud in zip(found["steps"], found["auto"]))
    edge = statistics.median(cloud.seconds / ours.seconds for ours, cloud in zip(found["off"], found["auto"]))
    steps = [step for one in found["steps"] for step in one.usage.steps]
    share = sum(one.usage.tokens.verified for one in found["steps"]) / (count * len(questions))
    drafting, judging, anew = (
        sum(getattr(step, f"seconds_{what}") for step in steps) for what in ("drafting", "judging", "rewriting")
    )
    cloud = sum(one.seconds for one in found["auto"])
    note = f"{sum(step.accepted for step in steps)} of {len(steps)} steps accepted; AUC {trusted.auc:.3f} on this task"
    note += f"; s in all: {drafting:.1f} drafting, {judging:.1f} judging, {anew:.1f} rewriting; cloud alone {cloud:.1f}"
    bound = cloud / (drafting + anew) if drafting + anew else None
    return [
        Figure(metric=f"seconds_{task}", value=ratio, unit="x", baseline=1.0, peer=edge, bound=bound, note=note),
        Figure(metric=f"cloud_tokens_{task}", value=share, unit="share", baseline=1.0, better="lower"),
    ]
