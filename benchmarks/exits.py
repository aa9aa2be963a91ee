"""Early exits on a text that drifts: what they save within a budget of wrong tokens, and that the budget is kept.

The text is a licence, then code, then documents, read token by token as it stands; a token that left is wrong if the
whole model says another. Ramps come from `ctxreuse calibrate smollm2 --exits`, which reads none of these texts. What
is saved is a share of the weights that a full step reads, less ramps, and less 11 % for the row that later layers
compute afterwards. Peer: the best thresholds of one or two ramps in hindsight, which know the whole text and keep the
budget on all of it, not in each window. Bound: every token leaves at the first ramp that is right. Time is that of a
processor, of an engine that reads the code, against full steps over the same tokens.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.engines.exits import ExitStep
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import ConfigError
from ctxreuse.exits import WINDOW, ExitController, ExitGate, ExitRow, RampCost
from ctxreuse.exits.profile import ExitProfile, ExitProfileStore
from ctxreuse.exits.records import Records
from ctxreuse.identity.keys import Tokens
from ctxreuse.kernels.linear import linear_top

__all__ = ["run"]

_BUDGETS = (0.01, 0.02, 0.05)
#: Tokens of each of the three texts, and of a window that is read at once.
_EACH, _AT_ONCE = 2048, 1024
#: Tokens that an engine reads with exits and without.
_TIMED = 600


class Scored(NamedTuple):
    """Of each token, by ramp, the score and whether it is right: [n, ramps]."""

    scores: npt.NDArray[np.float64]
    right: npt.NDArray[np.bool_]


class Replayed(NamedTuple):
    """What became of a text: the share saved, whether each token was wrong, and the share that left."""

    saved: float
    wrong: npt.NDArray[np.bool_]
    exits: float


def run(options: Options) -> list[Figure]:
    """Measure."""
    engine = TorchEngine.open("smollm2")
    profile = ExitProfileStore().find(engine.space)
    if profile is None:
        raise ConfigError("the model has no exit profile", fix="Run `ctxreuse calibrate smollm2 --exits`")
    engine.use_exits(profile)
    costs = engine.ramps
    assert not isinstance(costs, str)
    texts = _texts(engine, options.pick(512, _EACH))
    scored = _scored(engine, profile, texts, options)
    bound = _oracle(scored, costs)
    figures = []
    for budget in _BUDGETS:
        one = _replayed(scored, costs, budget)
        best = _hindsight(scored, costs, budget)
        worst = 100 * int(np.convolve(one.wrong, np.ones(WINDOW), "valid").max()) / WINDOW
        name = f"budget {budget:.0%}"
        note = f"{one.exits:.0%} of the tokens leave; {one.saved / best:.0%} of the peer" if best else ""
        figures += [
            Figure(
                metric=f"saved, {name}", value=100 * one.saved, unit="%", peer=100 * best, bound=100 * bound,
                bar=60 * best, note=note,
            ),
            Figure(
                metric=f"worst window of {WINDOW}, {name}", value=worst, unit="%", bar=100 * budget, better="lower",
                note=f"of all tokens {one.wrong.mean():.2%} are wrong",
            ),
        ]  # fmt: skip
    return [*figures, *_timed(engine, costs, texts[1], options)]


def _texts(engine: TorchEngine, each: int) -> list[Tokens]:
    from pydoc_data import topics

    assert engine.text is not None
    names = sorted(topics.topics)
    licence = Path(__file__).parents[1].joinpath("LICENSE").read_text("utf-8")
    documents = "\n\n".join(topics.topics[name] for name in names[2 * len(names) // 3 :])
    code = inspect.getsource(import_module("asyncio.base_events"))
    return [engine.text.encode(text, markers=False)[:each] for text in (licence, code, documents)]


def _scored(engine: TorchEngine, profile: ExitProfile, texts: Sequence[Tokens], options: Options) -> Scored:
    """What each ramp says of each token, by the model's own hidden states."""
    states, depths = engine.exit_states(), [ramp.depth for ramp in profile.ramps]
    scores, right = list[npt.NDArray[np.float64]](), list[npt.NDArray[np.bool_]]()
    parts = [ids[start : start + _AT_ONCE] for ids in texts for start in range(0, len(ids), _AT_ONCE)]
    for number, ids in enumerate(parts):
        options.step("hidden states", number, len(parts))
        found = states.read(ids, depths)
        tops = [linear_top(hidden, ramp.head) for hidden, ramp in zip(found.hidden, profile.ramps)]
        scores.append(np.stack([top["best"].astype(np.float64) - top["total"] for top in tops], 1))
        said = [ramp.candidates[top["index"]] for top, ramp in zip(tops, profile.ramps)]
        right.append(np.stack([one == found.said for one in said], 1))
    return Scored(np.concatenate(scores), np.concatenate(right))


def _replayed(scored: Scored, costs: Sequence[RampCost], budget: float) -> Replayed:
    """Let a controller decide, which learns of each token what an engine would tell it, when it would."""
    controller = ExitController(costs)
    gate = controller.gate(b"", budget)
    assert gate is not None
    wrong, saved, exits = np.zeros(len(scored.scores), bool), 0.0, 0
    waiting = list[ExitRow]()
    for at, (scores, right) in enumerate(zip(scored.scores, scored.right)):
        plan, left = gate.plan(), -1
        for ramp in plan.ramps:
            saved -= costs[ramp].cost
            if ramp in plan.least and scores[ramp] >= plan.least[ramp]:
                left = ramp
                break
        row = ExitRow({r: float(scores[r]) for r in plan.ramps}, {r: bool(right[r]) for r in plan.ramps}, left)
        if left < 0:
            gate.settle(-1, (*waiting, row))
            waiting = []
            continue
        # Ramps behind the one at which it left are computed for it later.
        saved += costs[left].saved - sum(costs[r].cost for r in plan.ramps if r > left)
        wrong[at], exits = not right[left], exits + 1
        waiting.append(row)
        gate.settle(left, ())
    controller.check()
    return Replayed(saved / len(wrong), wrong, exits / len(wrong))


def _hindsight(scored: Scored, costs: Sequence[RampCost], budget: float) -> float:
    """The share that the best thresholds would have saved."""
    records = Records(len(costs), len(scored.scores), math.inf)
    for scores, right in zip(scored.scores, scored.right):
        records.add(scores.tolist(), right.tolist())
    return records.best(costs, budget + 1 / len(scored.scores)).saved  # which counts one more as wrong


def _oracle(scored: Scored, costs: Sequence[RampCost]) -> float:
    first = np.where(scored.right.any(1), scored.right.argmax(1), len(costs))
    return float(np.array([*(cost.saved for cost in costs), 0.0])[first].mean())


def _timed(engine: TorchEngine, costs: Sequence[RampCost], ids: Tokens, options: Options) -> list[Figure]:
    """Processor time of an engine that reads a text token by token, with exits and without, in turns."""
    ids = ids[: options.pick(150, _TIMED)]
    controller = ExitController(costs)
    gate = controller.gate(b"", 0.05)
    assert gate is not None
    early, whole = engine.new_context(len(ids)), engine.new_context(len(ids))
    seconds = {"early": 0.0, "whole": 0.0}
    for number, token in enumerate(ids):
        options.step("steps", number, len(ids))
        began = time.process_time()
        _step(engine, early, token, gate)
        seconds["early"] += time.process_time() - began
        began = time.process_time()
        engine.prefill(whole, np.array([token], "<i4"))
        seconds["whole"] += time.process_time() - began
    return [
        Figure(
            metric="processor time of a token of code, budget 5%", value=1e3 * seconds["early"] / len(ids), unit="ms",
            baseline=1e3 * seconds["whole"] / len(ids), better="lower",
            note=f"{gate.exited} of {len(ids)} tokens left, from a start without any records; baseline: full steps",
        )
    ]  # fmt: skip


def _step(engine: TorchEngine, context: object, token: int, gate: ExitGate) -> None:
    (step,) = engine.exit_step([(context, np.array([token], "<i4"), gate.plan())])  # type: ignore[list-item]
    assert isinstance(step, ExitStep)
    gate.settle(step.left, step.rows)
