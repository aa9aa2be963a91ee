"""Chunks reused at other positions: divergence, work and time of each repair against full prefill (live).

Scenes of 4 and 8 chunks of 192 to 512 tokens, each computed before in another prompt: alone at its beginning (``head``)
or ``behind`` other documents in another order. They are placed behind a system text, repaired, and the next 128 tokens
scored against computing all of the prompt: mean KL, share of equal top-1, change of the text's likelihood, share of
layers times tokens that is computed anew. Half of the scenes are one text, half mixed documents. The baseline is
leaving the chunks out. Then the time to the first token over eight documents in a new order, through the runtime.

Set CTXREUSE_TRACES to the folder that has ``rag/``; without it texts that every Python brings along are read, and no
bar holds. ``--model``: another model than SmolLM2; sliding windows keep all tokens. ``--plot``: writes PATH.svg and
PATH.png of what repairs compute and what they leave wrong.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.archive import DEFAULT, Archive, an_archive, cut_to, model_for
from benchmarks.corpus import long_texts, pool
from benchmarks.picture import OTHERS, OURS, picture
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.block.levels import limit_name
from ctxreuse.errors import ConfigError

if TYPE_CHECKING:
    from ctxreuse.calibrate.cases import Kind, Shape
    from ctxreuse.calibrate.chunk_trial import PolicyOutcome
    from ctxreuse.engines.calibration import Fidelity
    from ctxreuse.engines.torch_hf import TorchEngine

__all__ = ["BEST", "OPTIONS", "Table", "draw", "order", "run"]

OPTIONS = ("model", "plot")
_MODEL = "smollm2"
#: The best policy of those that recompute at most so much must be at most so far from full prefill. Over 4 x 192 tokens
#: no choice of rows gets there: exact ones in place of the tenth that what follows attends to most leave .028.
_SHARE, _KL = 0.10, 0.020
BEST = "first-4+last-16+every-20+drift"
_OURS = (
    "ask-10%",
    BEST,
    "first-2+every-32+ask-5%+drift",
    "first-4+last-16+every-20+ask-5%+drift",
    "first-4+last-16+every-16+ask-10%+drift",
    "first-4+every-8+ask-15%+drift",
    "first-4+every-8+ask-30%+drift",
)
_PUBLISHED = ("none", "rotate", "random-15%", "first-8", "first-16", "v-5%", "v-15%", "k-15%", "first-8+v-30%")
_ALL = (*_PUBLISHED, *_OURS)
_SOME = ("rotate", "v-15%", *_OURS[1:])
_STOOD = {"head": "at their prompt's head", "behind": "behind another head"}
#: How many times quicker than full prefill the first token over documents in a new order must come.
_FASTER = 8.0
_DOCUMENTS, _TOKENS = 8, 256
_QUESTION = "What is said in the first of these documents, and by whom?"


class Table(NamedTuple):
    """Outcomes by kind and repair, and what leaving the chunks out does, a value a scene; seconds of full prefill."""

    outcomes: Mapping[tuple[Kind, str], Sequence[PolicyOutcome]]
    without: Sequence[Fidelity]
    seconds: Sequence[float]

    def kl(self, kind: Kind, repair: str) -> float:
        """Mean divergence over the scenes."""
        return statistics.fmean(outcome.fidelity.kl for outcome in self.outcomes[kind, repair])

    def work(self, kind: Kind, repair: str) -> float:
        """Mean share computed anew."""
        return statistics.fmean(outcome.recomputed for outcome in self.outcomes[kind, repair])


def run(options: Options) -> list[Figure]:
    """Figures of every repair, their order, the best one, and the time to the first token."""
    from ctxreuse.calibrate.cases import Shape

    name = options.model or _MODEL
    engine = model_for(name, options)
    corpus = long_texts()
    shapes: dict[Shape, tuple[int, tuple[str, ...]]] = {Shape(4, 192): (options.pick(1, 10), _ALL)}
    if not options.quick:
        shapes |= {Shape(8, 256): (4, _SOME), Shape(4, 512): (4, _SOME)}
    figures: list[Figure] = []
    for number, (shape, (count, repairs)) in enumerate(shapes.items()):
        table = _measure(engine, corpus.texts, shape, count, repairs, options)
        figures += _figures(shape.name, table)
        if options.plot is not None and number == 0:
            draw(table, options.plot, f"{shape.name} moved tokens, {name}")
        if number == 0:
            bars = corpus.real and not options.quick and name == _MODEL
            figures += _verdicts(table, corpus.source, bars=bars)
    with an_archive(engine, options) as archive:
        figures += _first_token(archive, options)
    return figures


def _measure(
    engine: TorchEngine, texts: Sequence[str], shape: Shape, count: int, repairs: Sequence[str], options: Options
) -> Table:
    from benchmarks.rivals.recompute import parse
    from ctxreuse.calibrate.cases import KINDS, eval_cases
    from ctxreuse.calibrate.chunk_trial import Trial

    assert engine.text is not None
    made = eval_cases(texts, engine.text, count, shape, engine.space.block_tokens)
    if not made:
        raise ConfigError(f"there is too little text for chunks of {shape.name} tokens")
    found: dict[tuple[Kind, str], list[PolicyOutcome]] = {}
    without, seconds = [], []
    steps = len(made) * len(KINDS) * len(repairs)
    for number, scene in enumerate(made):
        options.step(f"{shape.name}: full prefill", number * len(KINDS) * len(repairs), steps)
        trial = Trial(engine, scene)
        without.append(trial.without())
        seconds.append(trial.seconds)
        for kind in KINDS:
            for name in repairs:
                done = sum(map(len, found.values()))
                options.step(f"{shape.name}: {name}", done, steps)
                found.setdefault((kind, name), []).append(trial.outcome(parse(name), kind))
    return Table(found, without, seconds)


def _figures(shape: str, table: Table) -> list[Figure]:
    figures = []
    nothing = statistics.fmean(fidelity.kl for fidelity in table.without)
    for (kind, repair), outcomes in table.outcomes.items():
        top1, dnll = (statistics.fmean(getattr(one.fidelity, name) for one in outcomes) for name in ("top1", "dnll"))
        took = statistics.median(one.seconds for one in outcomes)
        figures.append(
            Figure(
                metric=f"{shape} {kind} {repair}",
                value=table.kl(kind, repair),
                unit="nats",
                baseline=nothing,
                better="lower",
                note=f"recomputed {table.work(kind, repair):.1%}, top-1 {top1:.1%}, likelihood {-dnll:+.3f} nats, "
                f"{took:.2f} s of {statistics.median(table.seconds):.2f} s, {len(outcomes)} scenes",
            )
        )
    return figures


def draw(table: Table, path: Path, what: str) -> None:
    """A picture of what repairs compute and what they leave wrong; filled: chunks from behind another head."""
    from ctxreuse.calibrate.plot import label_points

    named = []
    with picture(path, f"Repairs of {what}: further down and left is better") as axes:
        for ours, colour in ((False, OTHERS[0]), (True, OURS)):
            for kind, face in (("head", "white"), ("behind", colour)):
                mine = [key for key in table.outcomes if key[0] == kind and (key[1] in _OURS) == ours]
                points = [(100 * table.work(*key), table.kl(*key)) for key in mine]
                label = ("ours" if ours else "published, and simple ones") + f", stood {_STOOD[kind]}"
                mark = "o" if ours else "s"
                axes.scatter(*zip(*points), s=40, marker=mark, c=face, edgecolors=colour, label=label, zorder=3)
                named += [(*at, key[1] if kind == "behind" else "", colour) for key, at in zip(mine, points)]
        axes.set_xlabel("computed anew, % of layers times tokens")
        axes.set_ylabel("KL of the next 128 tokens against full prefill, nats")
        axes.legend(fontsize=9, framealpha=0.9, edgecolor="white")
        axes.set_yscale("log")
        label_points(axes, named, 7.5)


def order(kl: Mapping[str, float]) -> dict[str, bool]:
    """What is published of repairs of chunks that were computed alone, and whether these divergences agree."""
    return {
        "not turned > turned": kl["none"] > kl["rotate"],
        "turned > random rows": kl["rotate"] > kl["random-15%"],
        "random rows >> first 8": kl["random-15%"] > 1.3 * kl["first-8"],
        "first 8 = 5 % by deviation": 1 / 1.3 < kl["first-8"] / kl["v-5%"] < 1.3,
        "5 % > 15 % by deviation": kl["v-5%"] > kl["v-15%"],
    }


def _verdicts(table: Table, source: str, *, bars: bool) -> list[Figure]:
    held = order({repair: table.kl("head", repair) for kind, repair in table.outcomes if kind == "head"})
    cheap = [key for key in table.outcomes if table.work(*key) <= _SHARE]
    best = min(cheap, key=lambda key: table.kl(*key))
    wrong = ", ".join(name for name, true in held.items() if not true)
    return [
        Figure(
            metric="order of the repairs",
            value=sum(held.values()) / len(held),
            unit="share",
            bar=1.0 if bars else None,
            note=f"{source}; " + (f"not so: {wrong}" if wrong else "; ".join(held)),
        ),
        Figure(
            metric=f"best at {_SHARE:.0%}",
            value=table.kl(*best),
            unit="nats",
            baseline=table.kl("head", "v-15%"),
            better="lower",
            bar=_KL if bars else None,
            note=f"{best[1]} of chunks that stood {best[0]}, recomputed {table.work(*best):.1%}; baseline: 15 % by "
            f"deviation of chunks that were computed alone, {table.work('head', 'v-15%'):.1%}; {source}",
        ),
    ]


def _first_token(archive: Archive, options: Options) -> list[Figure]:
    """Seconds over eight documents that earlier prompts had in other orders, each way in turn."""
    corpus = pool(options.pick(12, 3 * _DOCUMENTS))
    count = options.pick(4, _DOCUMENTS)
    documents = cut_to(archive.text, corpus.texts, options.pick(128, _TOKENS)) or corpus.texts
    rounds = options.pick(1, 5)
    seconds: dict[str, list[float]] = {"full": [], "prefix": [], "ours": []}
    moved, said = 0, ""
    for first in range(0, count, count // 2):
        options.step("earlier prompts")
        half = documents[first : first + count // 2]
        done = archive.ask(archive.encode_prompt([documents[-1], *half[::-1]], _QUESTION), None).done
        archive.keep(done)
        del done
    for turn in range(rounds):
        options.step("documents in a new order", turn, rounds)
        chosen = [documents[(i * 3 + turn) % count] for i in range(count)]
        prompted = archive.encode_prompt(chosen, _QUESTION)
        seconds["full"].append(archive.prefill(prompted.ids))
        for name, max_kl in (("prefix", None), ("ours", DEFAULT)):
            answered = archive.ask(prompted, max_kl)
            seconds[name].append(answered.seconds)
            if name == "ours":
                moved, said = answered.done.usage.tokens.relocated, answered.done.usage.gate_decision
            del answered
    took = {name: statistics.median(values) for name, values in seconds.items()}
    what = f"{count} documents, {len(prompted.ids):,} tokens, {moved:,} of them moved, {said}; {corpus.source}"
    return [
        Figure(
            metric="time to first token, new order",
            value=took["ours"],
            unit="s",
            baseline=took["full"],
            peer=took["prefix"],
            better="lower",
            note=f"{what}; baseline: full prefill, peer: a prefix cache",
        ),
        Figure(
            metric="faster than full prefill, new order",
            value=statistics.median(a / b for a, b in zip(seconds["full"], seconds["ours"])),
            unit="x",
            bar=None if options.quick else _FASTER,
            note=f"at {limit_name(DEFAULT)}, by pairs; at most {len(prompted.ids) / (len(prompted.ids) - moved):.1f}x "
            "if what is not moved takes as long a token as in a full prefill",
        ),
    ]
