"""Calibration from start to end: read, solve, set steps, make tables, and measure every level on held-out text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block.levels import JOINT
from ctxreuse.calibrate.assemble import joint_planes, numbered, planes_alone, profile_levels, without_waste
from ctxreuse.calibrate.coding import Planned, make_plan
from ctxreuse.calibrate.gather import (
    Progress,
    Window,
    channel_groups,
    gather,
    joint_groups,
    normalise,
    window_rows,
)
from ctxreuse.calibrate.measure import LevelSet, measure
from ctxreuse.calibrate.steps import active_components, find_step
from ctxreuse.calibrate.texts import KindWindow, Part, Texts, in_turn, windows_by_kind
from ctxreuse.calibrate.transform import Basis, Transform, solve
from ctxreuse.calibrate.trial import Prepared, by_kind, compare, decode, prepare
from ctxreuse.codec.profile import (
    CodecProfile,
    model_digest,
)
from ctxreuse.engines.calibration import CalibrationModel
from ctxreuse.engines.text import TextModel
from ctxreuse.errors import ConfigError
from ctxreuse.rope import Rotary

__all__ = ["DEFAULT_TARGETS", "Settings", "Target", "calibrate", "settings_for"]

Floats = npt.NDArray[np.float32]


class Target(NamedTuple):
    """A level by what it promises: divergence at most ``kl`` on every kind of text; ``finer``: that of its refinement.

    0 for none. ``joint``: planes of several layers are coded as one.
    """

    kl: float
    finer: float = 0.0
    joint: bool = False

    @classmethod
    def parse(cls, text: str) -> tuple[Target, ...]:
        """Targets as users write them, ``0.05+0.008,0.01-joint``; raises ConfigError for anything else."""
        found = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(0?\.\d{1,10})(?:\+(0?\.\d{1,10}))?(-joint)?\s*", part)
            target = cls(float(match[1]), float(match[2] or 0), bool(match[3])) if match else cls(0.0)
            if not target.finer < target.kl < 1:
                raise ConfigError(f"no level: {part!r}", fix="Write divergences below 1, as in 0.05+0.008,0.01,0.002")
            found.append(target)
        names = [name for target in found for name in target.names]
        if len(set(names)) < len(names):
            raise ConfigError(f"a level is given twice: {text}", fix="Give each divergence once")
        return tuple(found)

    @property
    def names(self) -> tuple[str, ...]:
        suffix = JOINT if self.joint else ""
        return tuple(f"kl-{value:.10f}".rstrip("0") + suffix for value in (self.kl, self.finer) if value)


#: A third of the step divides the divergence by 7 to 9. Joint levels are for links and disks where bytes cost more
#: than decoding.
DEFAULT_TARGETS = (
    Target(0.05, 0.008),
    Target(0.01, 0.0015),
    Target(0.002),
    Target(0.1, joint=True),
    Target(0.05, joint=True),
    Target(0.01, joint=True),
)


class Settings(NamedTuple):
    """How much is read: ``windows`` of ``prefix`` + ``scored`` tokens of each part of the texts, of all kinds together.

    ``draws`` samples of the next tokens a window; ``epsilon``: see `transform.solve`.
    """

    windows: dict[Part, int]
    prefix: int = 768
    scored: int = 192
    draws: int = 2
    epsilon: float = 0.02
    targets: tuple[Target, ...] = DEFAULT_TARGETS


#: A name is a promise on other text: held-out divergence was up to a quarter above that of the validation windows, and
#: up to 1.4 times as large at joint levels, whose transforms have learnt from less text for their size.
_MARGIN, _JOINT_MARGIN = 0.8, 0.7
#: The share of unseen tokens at which text is of an unknown kind: so much above the largest in a measured block, and at
#: least half. Of 2,857 blocks of articles and passages none had as many, of random ids all, of Greek nine in ten.
_UNSEEN, _LEAST_UNSEEN = 1.25, 0.5
_SCORES = 1 << 25
_OTHER_LEVELS = "Ask for levels without -joint"
_ROWS = 8192
_SAMPLED = 2560


def settings_for(
    model: CalibrationModel, *, calibration: int = 20, validation: int = 10, held_out: int = 10
) -> Settings:
    """The usual amounts for a model: fewer scored tokens for a large vocabulary, shorter windows for a short model."""
    counts: dict[Part, int] = {"calibration": calibration, "validation": validation, "held-out": held_out}
    scored = min(192, max(32, _SCORES // model.space.vocab_size))
    prefix = min(768, model.space.max_tokens - scored)
    return Settings(counts, prefix, scored)


def calibrate(
    model: CalibrationModel,
    text: TextModel,
    texts: Texts,
    settings: Settings,
    progress: Progress,
    notes: dict[str, str],
) -> CodecProfile:
    """Calibrate a model; equal inputs give equal profiles, to the byte, on the same machine.

    Raises ConfigError for too little text, EngineError for a model that cannot be calibrated.
    """
    cut = {part: _cut(text, texts, part, settings) for part in settings.windows}
    rotaries = model.rotaries()
    learnt = _read(model, cut["calibration"], settings, progress)
    planes = learnt[0].reading.planes
    targets = [[one for one in settings.targets if one.joint is joint] for joint in (False, True)]
    groups = [list(channel_groups(planes)), joint_groups(planes, model.space.layers) if targets[1] else []]
    if not targets[0] and not groups[1]:
        raise ConfigError("this model has no joint levels: K and V of a layer have different heads", fix=_OTHER_LEVELS)
    stats = gather(model, learnt, [*groups[0], *groups[1]], rotaries, settings.draws, progress)
    transforms = []
    for number, one in enumerate(stats):
        progress("transforms", number, len(stats))
        transforms.append(solve(one, epsilon=settings.epsilon))
    progress("transforms", len(stats), len(stats))
    validation = _read(model, cut["validation"], settings, progress)
    families, exact = list[LevelSet](), list[Floats]()
    for own, wanted in zip(groups, targets):
        if not own:
            continue
        at = sum(len(family.basis.transforms) for family in families)
        basis = Basis(transforms[at : at + len(own)], rotaries)
        samples = [_components(learnt, transform, rotaries, _SAMPLED) for transform in basis.transforms]
        prepared = [prepare(model, window, basis, *exact[i : i + 1]) for i, window in enumerate(validation)]
        exact = [one.exact for one in prepared]
        families.append(LevelSet(basis, tuple(_levels(model, prepared, basis, samples, wanted, progress))))
    del samples, prepared, validation
    plan = make_plan(
        len(stats),
        lambda i: _components(learnt, transforms[i], rotaries, _ROWS),
        numbered(families),
        lambda i: progress("tables", i, len(stats)),
    )
    progress("tables", len(stats), len(stats))
    seen, unseen = _familiar(model, text, texts, [*cut["validation"], *cut["held-out"]])
    ropes = tuple(dict.fromkeys(rotaries[layer] for layer in sorted(rotaries)))
    alone, *joint = families
    profile = CodecProfile(
        model=model_digest(model.space),
        ropes=ropes,
        planes=planes_alone(alone, ropes, model),
        tables=plan.tables,
        levels=profile_levels(families, plan.codings),
        notes=notes,
        seen=seen,
        unseen=unseen,
        version=3 if joint else 2,
        joint=joint_planes(joint[0], ropes, model) if joint else (),
    )
    return without_waste(measure(model, profile, families, cut["held-out"], settings.prefix, progress))


def _familiar(
    model: CalibrationModel, text: TextModel, texts: Texts, measured: Sequence[KindWindow]
) -> tuple[bytes, float]:
    """One bit for each token id of the calibration texts, and the largest share of others that a block may have."""
    seen = np.zeros(model.space.vocab_size, bool)
    for document in in_turn(texts["calibration"]):
        seen[text.encode(document, markers=False)] = True
    size = model.space.block_tokens
    shares = [1 - seen[ids[at : at + size]].mean() for _, ids in measured for at in range(0, len(ids) - size + 1, size)]
    return np.packbits(seen).tobytes(), min(max(_UNSEEN * float(max(shares, default=1.0)), _LEAST_UNSEEN), 1.0)


def _cut(text: TextModel, texts: Texts, part: Part, settings: Settings) -> list[KindWindow]:
    length = settings.prefix + settings.scored
    found = windows_by_kind(texts[part], text, settings.windows[part], length, settings.prefix)
    if not found:
        raise ConfigError(
            f"the {part} text is too short: not one window of {length} tokens",
            fix=f"Give at least {4 * length} tokens of text, or several files",
        )
    return found


def _read(model: CalibrationModel, cut: Sequence[KindWindow], settings: Settings, progress: Progress) -> list[Window]:
    read = []
    for number, (kind, ids) in enumerate(cut):
        progress("reading", number, len(cut))
        read.append(Window(model.read(ids[: settings.prefix]), ids[settings.prefix :], kind))
    progress("reading", len(cut), len(cut))
    return read


def _components(windows: Sequence[Window], transform: Transform, rotaries: dict[int, Rotary], rows: int) -> Floats:
    """y of a group for at most about ``rows`` rows of all windows, evenly spread."""
    parts = []
    for window in windows:
        found = window_rows(window, transform.stats.channels, rotaries)
        stride = max(1, -(-len(found) * len(windows) // rows))
        parts.append(normalise(found[::stride], transform.stats)[0] @ transform.forward.T)
    return np.concatenate(parts)


def _levels(
    model: CalibrationModel,
    prepared: Sequence[Prepared],
    basis: Basis,
    samples: Sequence[Floats],
    targets: Sequence[Target],
    progress: Progress,
) -> list[Planned]:
    """All levels from coarse to fine, their steps set on the kind of validation text that suffers most."""
    if not targets:
        return []
    tried = 0
    kinds = [one.window.kind for one in prepared]

    def divergence(step: float) -> float:
        nonlocal tried
        tried += 1
        progress("steps", tried - 1, 0)
        active = active_components(samples, step)
        values = []
        for window in prepared:
            planes = decode(window, basis, step, active)
            other = model.scores(window.window.reading, window.window.following, planes)
            values.append(compare(window.exact, other, window.window.following))
        return max(mean.kl for mean in by_kind(kinds, values).values())

    guess = _first_step(basis.transforms, targets[0].kl, len(prepared[0].scales[0]))
    found: list[tuple[str, float, str]] = []
    for target in sorted(targets, reverse=True):
        margin = _JOINT_MARGIN if target.joint else _MARGIN
        most, finest = margin * target.kl, margin * target.finer
        step, _ = find_step(divergence, most, guess)
        if target.finer and (reached := divergence(step / 3)) > finest:
            finer, _ = find_step(divergence, finest, step / 3 * (finest / reached) ** 0.5)
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
            # All that the base codes is refined; and scales travel with the base, so it codes something wherever we do.
            below = levels[numbers[base]]
            active = [max(a, b) for a, b in zip(active, below.active)]
            levels[numbers[base]] = below._replace(active=tuple(max(b, a > 0) for a, b in zip(active, below.active)))
        levels.append(Planned(name, step, tuple(active), numbers[base] if base else None))
    return levels


def _first_step(transforms: Sequence[Transform], kl: float, rows: int) -> float:
    """The step at which errors of step^2 / 12 in all components would add up to a divergence."""
    total = sum(len(t.variance) for t in transforms)
    return float(np.sqrt(kl * 2 * 12 / (total * rows)))
