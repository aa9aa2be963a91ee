"""Bits a K/V value against the divergence that they cost, ours and published codecs, on five kinds of text.

None was calibrated on.

Of each text 768 tokens are coded and the next 192 scored against the exact cache: mean KL of the next token's
distribution, share of equal top-1, change of the text's likelihood. Ours codes blocks of 64 tokens, each on its own,
with the real coder; all bytes of the blocks count, heads, checksums, padding and raw first tokens included, and they
are loaded by the engine as any block is. Rivals code the 768 tokens as one chunk and get what helps them (see
`benchmarks.rivals`; the one that keeps fewer rows: `benchmarks.rate.compacted`). Windows of sliding layers are coded as
well. Options: ``--model``, ``--text`` (files instead of one text of each kind), ``--plot`` (writes PATH.svg and
PATH.png).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from benchmarks.rate.curve import Point, Rate, at_divergence, best_meeting
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.block.levels import expected_kl, is_joint
from ctxreuse.errors import ConfigError

__all__ = ["BARS", "OPTIONS", "figures_of", "figures_on", "means", "points_by_text", "run"]

#: Settings beyond ``quick`` that the command line may hand over.
OPTIONS = frozenset({"model", "texts", "plot"})
#: KL in nats to the bits that a plain uniform quantiser with entropy coding took on SmolLM2: the bar.
BARS = {0.0022: 4.14, 0.0102: 3.13, 0.046: 2.18}
#: Levels that code each plane by itself, and those that code the planes of several layers as one.
OURS, JOINTLY = "ctxreuse", "ctxreuse joint"
#: Is coded by ours in part, and so no rival of it.
_BOTH = "Attention Matching at our levels"
_MODEL = "smollm2"
T = TypeVar("T")


def run(options: Options) -> list[Figure]:
    """Figures at the three divergences, then every codec at every setting against ours at the same divergence."""
    model = options.model or _MODEL
    by_text = points_by_text(model, options)
    points = means(by_text)
    if options.plot is not None:
        from benchmarks.rate.plot import draw

        options.step("plot")
        draw(points, options.plot, (OURS, JOINTLY), model, tuple(BARS))
    figures = figures_of(points, BARS if model == _MODEL else dict.fromkeys(BARS))
    return figures + [figure for name, own in by_text.items() for figure in figures_on(name, own)]


def points_by_text(model: str, options: Options) -> dict[str, list[Point]]:
    """Every codec at every setting on each text. Raises ConfigError without a card or without texts."""
    from benchmarks.rate.compacted import ASK, COMPACTIONS, Compactor
    from benchmarks.rate.context import CODED, SCORED, Context
    from benchmarks.rate.learn import learn
    from benchmarks.rate.texts import held_out, read_texts, tokens_of
    from benchmarks.rivals import KVTC, PLAIN, RIVALS
    from ctxreuse.engines.torch_hf import TorchEngine
    from ctxreuse.engines.torch_hf.fisher import TorchCalibrationModel

    options.step(f"opening {model}")
    engine = TorchEngine.open(model)
    codec = engine.codec
    levels = [info.name for info in codec.levels if info.lossy]
    if not levels:
        raise ConfigError(f"there is no card of {model}", fix=f"Run: ctxreuse calibrate {model}")
    if engine.text is None:
        raise ConfigError("the model has no tokenizer", where=model)
    texts = read_texts(options.texts) if options.texts else held_out()
    cut = {name: tokens_of(engine.text, text, CODED + SCORED + 1) for name, text in texts.items()}
    chosen = [(name, ids) for name, ids in cut.items() if ids is not None][: options.pick(1, len(cut))]
    if not chosen:
        raise ConfigError(f"no text has {CODED + SCORED + 1} tokens", fix="Give longer ones")
    gauge = TorchCalibrationModel(engine)
    rotaries = gauge.rotaries()
    rivals = [rival for family in (*RIVALS, PLAIN) for rival in family]
    whole = () if engine.space.needs_state else KVTC
    if whole:
        options.step("what KVTC learns")
    bases = learn(gauge, engine.text) if whole else {}
    compactions, ask = COMPACTIONS if whole else (), engine.text.encode(ASK, markers=False)
    steps, done = len(chosen) * (1 + len(levels) + len(rivals) + len(whole) + len(compactions) + bool(compactions)), 0
    found: dict[str, list[Point]] = {}

    def measured(text: str, what: str, call: Callable[[], T]) -> T:
        nonlocal done
        options.step(f"{text}: {what}", done, steps)
        done += 1
        return call()

    for name, ids in chosen:
        context = measured(name, "exact", lambda ids=ids: Context(engine, rotaries, ids))  # type: ignore[misc]
        for level in levels:
            fidelity, bits = measured(name, level, lambda c=context, n=level: c.ours(codec, n))  # type: ignore[misc]
            family = JOINTLY if is_joint(level) else OURS
            found.setdefault(name, []).append(Point(family, level, bits / context.values, *fidelity))
        for rival in rivals:
            what = f"{rival.family}, {rival.setting}"
            fidelity, bits = measured(name, what, lambda c=context, r=rival: c.rival(r))  # type: ignore[misc]
            found[name].append(Point(rival.family, rival.setting, bits / context.values, *fidelity))
        for one in whole:
            what = f"{one.family}, {one.setting}"
            fidelity, bits = measured(name, what, lambda c=context, o=one: c.kvtc(o, bases))  # type: ignore[misc]
            found[name].append(Point(one.family, one.setting, bits / context.values, *fidelity))
        if compactions:
            fewer = measured(name, "what asks for K and V", lambda i=ids: Compactor(engine, rotaries, i, CODED, ask))  # type: ignore[misc]
        for way in compactions:
            what = f"{way.family}, {way.setting}"
            fidelity, bits = measured(name, what, lambda f=fewer, w=way: f.measure(w, codec))  # type: ignore[misc]
            found[name].append(Point(way.family, way.setting, bits / context.values, *fidelity))
    return found


def means(by_text: dict[str, list[Point]]) -> list[Point]:
    """Every codec at every setting, means over the texts."""
    return [
        Point(*rows[0][:2], *(math.fsum(column) / len(rows) for column in zip(*(row[2:] for row in rows))))
        for rows in zip(*by_text.values(), strict=True)
    ]


def figures_on(text: str, points: Sequence[Point]) -> list[Figure]:
    """Each level on one text: its bits, whether its name is kept, and the best rival at the same divergence."""
    grouped = families(points)
    figures = []
    for level in [*grouped.pop(JOINTLY, []), *grouped.pop(OURS)]:
        rates = {name: at_divergence(family, level.kl).bits for name, family in grouped.items() if name != _BOTH}
        best, named = min(rates, key=lambda name: rates[name]), expected_kl(level.setting)
        figures.append(
            Figure(
                metric=f"{level.setting} on {text}",
                value=level.bits,
                unit="bits",
                peer=rates[best],
                better="lower",
                note=f"{_said(level)}: {level.kl / named:.2f} of its name; peer at the same KL: {best}",
            )
        )
    return figures


def families(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each family, in the order of the points."""
    grouped: dict[str, list[Point]] = {}
    for point in points:
        grouped.setdefault(point.family, []).append(point)
    return grouped


def figures_of(points: Sequence[Point], bars: dict[float, float | None] | dict[float, float]) -> list[Figure]:
    """What the points say; ``bars``: divergence to the bits that ours may take there at most, or None."""
    grouped = families(points)
    ours = [own for own in (grouped.pop(JOINTLY, None), grouped.pop(OURS)) if own]
    figures = [_promised(ours, kl, bar) for kl, bar in bars.items()]
    figures += [_equal(ours, grouped, kl) for kl in bars]
    figures += [_level(point) for own in ours for point in own]
    figures += [_rival(point, ours) for family in grouped.values() for point in family]
    return figures


def _ours_at(ours: Sequence[Sequence[Point]], kl: float) -> Rate:
    """Ours at a divergence, of the family that takes fewer bits there; one that was measured there if any was."""
    return min((at_divergence(own, kl) for own in ours), key=lambda rate: (not rate.measured, rate.bits))


def _promised(ours: Sequence[Sequence[Point]], kl: float, bar: float | None) -> Figure:
    """What whoever allows a divergence pays: the cheapest level that keeps to it."""
    level = best_meeting([point for own in ours for point in own], kl)
    return Figure(
        metric=f"level within KL {kl:g}",
        value=_ours_at(ours, kl).bits if level is None else level.bits,
        unit="bits",
        better="lower",
        bar=bar,
        note="between levels, as none keeps to it" if level is None else f"{level.setting}: {_said(level)}",
    )


def _equal(ours: Sequence[Sequence[Point]], rivals: dict[str, list[Point]], kl: float) -> Figure:
    """Ours and every rival at the same divergence."""
    rates = {name: at_divergence(family, kl) for name, family in rivals.items()}
    rates = {name: rate for name, rate in rates.items() if rate.bits < math.inf}
    best = min(rates.keys() - {_BOTH}, key=lambda name: rates[name].bits)
    told = [f"{name} {rate.bits:.2f}{'' if rate.measured else ' (drawn on)'}" for name, rate in rates.items()]
    return Figure(
        metric=f"at equal KL {kl:g}",
        value=_ours_at(ours, kl).bits,
        unit="bits",
        peer=rates[best].bits,
        better="lower",
        note=f"between levels; peer: {best}; {', '.join(told)}",
    )


def _said(point: Point) -> str:
    return f"KL {point.kl:.4f}, top-1 {100 * point.top1:.1f} %, dNLL {point.dnll:+.4f}"


def _level(point: Point) -> Figure:
    return Figure(
        metric=f"{OURS} {point.setting}", value=point.bits, unit="bits", better="lower", bound=32, note=_said(point)
    )


def _rival(point: Point, ours: Sequence[Sequence[Point]]) -> Figure:
    rate = _ours_at(ours, point.kl)
    return Figure(
        metric=f"at the KL of {point.family}, {point.setting}",
        value=rate.bits,
        unit="bits",
        peer=point.bits,
        better="lower",
        bar=point.bits if rate.measured and point.family != _BOTH else None,
        note=_said(point) + ("" if rate.measured else "; ours extrapolated"),
    )
