"""Calibration from start to end: read, solve, set steps, make tables, and measure every level on held-out text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.calibrate.coding import Planned, make_plan
from ctxreuse.calibrate.gather import Progress, Window, gather, normalise, window_rows
from ctxreuse.calibrate.measure import measure
from ctxreuse.calibrate.steps import active_components, find_step
from ctxreuse.calibrate.texts import Part, Texts, windows
from ctxreuse.calibrate.transform import Transform, solve
from ctxreuse.calibrate.trial import Prepared, compare, decode, mean_fidelity, prepare
from ctxreuse.codec.card import Card, CardLevel, PlaneCard, Rope, model_digest
from ctxreuse.codec.levels import LevelInfo
from ctxreuse.engines.gauge import Gauge, Rotary
from ctxreuse.engines.text import TextModel
from ctxreuse.errors import ConfigError

__all__ = ["DEFAULT_TARGETS", "Settings", "Target", "calibrate", "settings_for"]

Floats = npt.NDArray[np.float32]


class Target(NamedTuple):
    """A level by what it promises: divergence at most ``kl``; ``finer``: that of its refinement, 0 for none."""

    kl: float
    finer: float = 0.0

    @classmethod
    def parse(cls, text: str) -> tuple[Target, ...]:
        """Targets as users write them, ``0.05+0.008,0.01``; raises ConfigError for anything else."""
        found = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(0?\.\d{1,10})(?:\+(0?\.\d{1,10}))?\s*", part)
            target = cls(float(match[1]), float(match[2] or 0)) if match else cls(0.0)
            if not target.finer < target.kl < 1:
                raise ConfigError(f"no level: {part!r}", fix="Write divergences below 1, as in 0.05+0.008,0.01,0.002")
            found.append(target)
        names = [name for target in found for name in target.names]
        if len(set(names)) < len(names):
            raise ConfigError(f"a level is asked for twice: {text}", fix="Give each divergence once")
        return tuple(found)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"kl-{value:.10f}".rstrip("0") for value in (self.kl, self.finer) if value)


#: A third of the step divides the divergence by 7 to 9.
DEFAULT_TARGETS = (Target(0.05, 0.008), Target(0.01, 0.0015), Target(0.002))


class Settings(NamedTuple):
    """How much is read: ``windows`` of ``prefix`` + ``scored`` tokens of each part of the texts.

    ``draws`` samples of the next tokens a window; ``epsilon``: see `transform.solve`.
    """

    windows: dict[Part, int]
    prefix: int = 768
    scored: int = 192
    draws: int = 2
    epsilon: float = 0.02
    targets: tuple[Target, ...] = DEFAULT_TARGETS


#: A name is a promise on other text: held-out divergence was up to a quarter above that of the validation windows.
_MARGIN = 0.8
_SCORES = 1 << 25
_ROWS = 8192
_SAMPLED = 2560


def settings_for(gauge: Gauge, *, calibration: int = 24, validation: int = 6, held_out: int = 8) -> Settings:
    """The usual amounts for a model: fewer scored tokens for a large vocabulary, shorter windows for a short model."""
    counts: dict[Part, int] = {"calibration": calibration, "validation": validation, "held-out": held_out}
    scored = min(192, max(32, _SCORES // gauge.space.vocab_size))
    prefix = min(768, gauge.space.max_tokens - scored)
    return Settings(counts, prefix, scored)


def calibrate(
    gauge: Gauge,
    text: TextModel,
    texts: Texts,
    settings: Settings,
    progress: Progress,
    notes: dict[str, str],
) -> Card:
    """The card of a model. Raises ConfigError for too little text, EngineError for a model that cannot be calibrated.

    Equal inputs give equal cards, bytes and all, on the same machine.
    """
    cut = {part: _cut(text, texts, part, settings) for part in settings.windows}
    rotaries = gauge.rotaries()
    learnt = _read(gauge, cut["calibration"], settings, progress)
    stats = gather(gauge, learnt, rotaries, settings.draws, progress)
    transforms = [solve(s, epsilon=settings.epsilon) for s in stats]
    components = partial(_components, learnt, transforms, rotaries)
    samples = [components(i, _SAMPLED) for i in range(len(transforms))]
    validation = _read(gauge, cut["validation"], settings, progress)
    prepared = [prepare(gauge, window, transforms, rotaries) for window in validation]
    levels = _levels(gauge, prepared, transforms, rotaries, samples, settings.targets, progress)
    del samples, prepared, validation
    transforms = [t.narrowed(2 * float(np.median([lv.step for lv in levels]))) for t in transforms]
    plan = make_plan(
        len(transforms), lambda i: components(i, _ROWS), levels, lambda i: progress("tables", i, len(transforms))
    )
    progress("tables", len(transforms), len(transforms))
    planes, ropes = _planes(transforms, rotaries, gauge, [max(c) for c in zip(*(lv.active for lv in levels))])
    card = Card(
        model=model_digest(gauge.space),
        ropes=ropes,
        planes=planes,
        tables=plan.tables,
        levels=tuple(
            CardLevel(
                LevelInfo(lv.name, True, 0.0, base="" if lv.base is None else levels[lv.base].name), lv.step, codings
            )
            for lv, codings in zip(levels, plan.codings)
        ),
        notes=notes,
    )
    return measure(gauge, card, transforms, rotaries, levels, cut["held-out"], settings.prefix, progress)


def _cut(text: TextModel, texts: Texts, part: Part, settings: Settings) -> list[npt.NDArray[np.int32]]:
    length = settings.prefix + settings.scored
    found = windows(texts[part], text, settings.windows[part], length, settings.prefix)
    if not found:
        raise ConfigError(
            f"the {part} text is too short: not one window of {length} tokens",
            fix=f"Give at least {4 * length} tokens of text, or several files",
        )
    return found


def _read(gauge: Gauge, cut: Sequence[npt.NDArray[np.int32]], settings: Settings, progress: Progress) -> list[Window]:
    read = []
    for number, ids in enumerate(cut):
        progress("reading", number, len(cut))
        read.append(Window(gauge.read(ids[: settings.prefix]), ids[settings.prefix :]))
    progress("reading", len(cut), len(cut))
    return read


def _components(
    windows: Sequence[Window], transforms: Sequence[Transform], rotaries: dict[int, Rotary], group: int, rows: int
) -> Floats:
    """y of a group for at most about ``rows`` rows of all windows, evenly spread."""
    transform = transforms[group]
    stats = transform.stats
    parts = []
    for window in windows:
        held = window_rows(window, stats.layer, stats.role, rotaries)
        stride = max(1, -(-len(held) * len(windows) // rows))
        parts.append(normalise(held[::stride], stats)[0] @ transform.forward.T)
    return np.concatenate(parts)


def _levels(
    gauge: Gauge,
    prepared: Sequence[Prepared],
    transforms: Sequence[Transform],
    rotaries: dict[int, Rotary],
    samples: Sequence[Floats],
    targets: Sequence[Target],
    progress: Progress,
) -> list[Planned]:
    """All levels from coarse to fine, their steps set on the validation windows."""
    tried = 0

    def divergence(step: float) -> float:
        nonlocal tried
        tried += 1
        progress("steps", tried - 1, 0)
        active = active_components(samples, step)
        values = []
        for window in prepared:
            planes = decode(window, transforms, rotaries, step, active)
            other = gauge.scores(window.window.reading, window.window.following, planes)
            values.append(compare(window.exact, other, window.window.following))
        return mean_fidelity(values).kl

    guess = _first_step(transforms, targets[0].kl, len(prepared[0].scales[0]))
    found: list[tuple[str, float, str]] = []
    for target in sorted(targets, reverse=True):
        step, _ = find_step(divergence, _MARGIN * target.kl, guess)
        if target.finer and (reached := divergence(step / 3)) > _MARGIN * target.finer:
            finer, _ = find_step(
                divergence, _MARGIN * target.finer, step / 3 * (_MARGIN * target.finer / reached) ** 0.5
            )
            step = min(step, 3 * finer)
        names = target.names
        # The finer step is the number that is kept: a base's is exactly three times it.
        fine = float(np.float32(step / 3)) if target.finer else float(np.float32(step))
        found.append((names[0], float(np.float32(3) * np.float32(fine)) if target.finer else fine, ""))
        if target.finer:
            found.append((names[1], fine, names[0]))
        guess = step * 0.4
    found.sort(key=lambda item: -item[1])
    numbers = {name: number for number, (name, _, _) in enumerate(found)}
    levels: list[Planned] = []
    for name, step, base in found:
        active = active_components(samples, step)
        if base:
            # Whatever the base codes is refined; and scales travel with it, so it codes something wherever we do.
            below = levels[numbers[base]]
            active = [max(a, b) for a, b in zip(active, below.active)]
            levels[numbers[base]] = below._replace(active=tuple(max(b, a > 0) for a, b in zip(active, below.active)))
        levels.append(Planned(name, step, tuple(active), numbers[base] if base else None))
    return levels


def _first_step(transforms: Sequence[Transform], kl: float, rows: int) -> float:
    """The step at which errors of step^2 / 12 in all components would add up to a divergence."""
    total = sum(len(t.variance) for t in transforms)
    return float(np.sqrt(kl * 2 * 12 / (total * rows)))


def _planes(
    transforms: Sequence[Transform], rotaries: dict[int, Rotary], gauge: Gauge, components: Sequence[int]
) -> tuple[tuple[PlaneCard, ...], tuple[Rope, ...]]:
    ropes = list(dict.fromkeys(rotaries[layer] for layer in sorted(rotaries)))
    planes: list[PlaneCard] = []
    for transform, n in zip(transforms, components):
        stats = transform.stats
        spec = gauge.space.layers[stats.layer]
        group = transform.card(n)
        if planes and (planes[-1].layer, planes[-1].role) == (stats.layer, stats.role):
            planes[-1] = PlaneCard(
                stats.layer, stats.role, spec.kv_heads, stats.dim, planes[-1].rope, (*planes[-1].groups, group)
            )
            continue
        rope = ropes.index(rotaries[stats.layer]) if stats.role == "k" else -1
        planes.append(PlaneCard(stats.layer, stats.role, spec.kv_heads, stats.dim, rope, (group,)))
    return tuple(planes), tuple(Rope(r.style, np.array(r.inv_freq, np.float64), r.scale) for r in ropes)
