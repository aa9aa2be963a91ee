"""Calibration of chunk reuse: what each repair costs and does to the next tokens, and what a wrong run looks like."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ctxreuse.calibrate.bounds import upper_bound
from ctxreuse.calibrate.gather import Progress
from ctxreuse.calibrate.moved import Outcome, Trial
from ctxreuse.calibrate.probing import Limits, Probing
from ctxreuse.calibrate.reading import READINGS, Reading, measure_reading
from ctxreuse.calibrate.scenes import KINDS, Kind, Shape, scenes
from ctxreuse.calibrate.texts import Texts
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.reuse.card import ChunkCard, Measured, Read, card_model
from ctxreuse.reuse.naming import parse

__all__ = ["ChunkSettings", "calibrate_chunks", "chunk_settings"]

#: From cheap to dear; the gate takes the cheapest whose bound is within what a request allows.
REPAIRS = (
    "rotate",
    "first-4+last-16+every-20+drift",
    "first-4+every-12+ask-5%+drift",
    "v-15%",
    "first-4+every-8+ask-15%+drift",
)
_QUICK = ("rotate", "first-4+last-16+every-20+drift")
#: Values of all scores of one scene, as for levels.
_SCORES = 1 << 25
_Found = dict[tuple[Shape, Kind, str], list[Outcome]]


class ChunkSettings(NamedTuple):
    """How much is measured: scenes of each shape, with each of ``repairs``; and reading runs where they are held, if
    ``reading`` says so."""

    shapes: tuple[tuple[Shape, int], ...]
    repairs: tuple[str, ...] = REPAIRS
    reading: Reading | None = None


def chunk_settings(engine: TorchEngine, *, quick: bool = False) -> ChunkSettings:
    """The usual amounts for a model: fewer scored tokens for a large vocabulary, shorter chunks for a short model."""
    space = engine.space
    scored = min(128, max(32, _SCORES // space.vocab_size))
    wanted = ((4, 128, 4),) if quick else ((4, 192, 6), (8, 256, 4))
    # A source holds about as much as the prompt: a lead, half of the chunks, and another document.
    room = space.max_tokens - scored - 256
    least = space.block_tokens
    shapes = [(Shape(n, min(width, room // n // least * least), scored), count) for n, width, count in wanted]
    if any(shape.width < least for shape, _ in shapes):
        raise ConfigError(
            f"the model has {space.max_tokens} positions, too few to move chunks in", where=space.architecture
        )
    held = min(896, (space.max_tokens - 128) // least * least)
    reading = Reading(1, least, held // 2, 16, READINGS[:1]) if quick else Reading(4, least, held, 40)
    return ChunkSettings(tuple(dict(shapes).items()), _QUICK if quick else REPAIRS, reading if held > 0 else None)


def calibrate_chunks(
    engine: TorchEngine, texts: Texts, settings: ChunkSettings, progress: Progress, notes: Mapping[str, str]
) -> ChunkCard:
    """The chunk card of a model, measured by placing, comparing and mending as any request does.

    Takes the texts that levels are measured on ("held-out"). A repair that the engine cannot do (rows in a model that
    keeps states) is left out, so a model may get a card that allows little or nothing. Raises ConfigError for too
    little text or no tokenizer, EngineError if the engine cannot move rows at all.
    """
    if engine.text is None:
        raise ConfigError("the folder holds no tokenizer.json, so no text can be read", fix="Add the file")
    found: _Found = {}
    probing = Probing(engine.space)
    refused: dict[str, str] = {}
    for shape, count in settings.shapes:
        made = scenes(texts["held-out"], engine.text, count, shape, engine.space.block_tokens)
        if not made:
            needed = 2 * (shape.tokens + shape.following)
            raise ConfigError(
                f"too little text for chunks of {shape.name} tokens", fix=f"Give {needed:,} tokens, or several files"
            )
        steps, done = len(made) * len(KINDS) * (1 + len(settings.repairs)), 0
        for scene in made:
            progress(f"chunks {shape.name}", done, steps)
            trial = Trial(engine, scene)
            for kind in KINDS:
                probing.add(trial, kind)
                done += 1
                for name in settings.repairs:
                    progress(f"chunks {shape.name}", done, steps)
                    done += 1
                    if name in refused:
                        continue
                    try:
                        outcome = trial.outcome(parse(name), kind)
                    except EngineError as error:
                        refused[name] = error.what
                        continue
                    found.setdefault((shape, kind, name), []).append(outcome)
        progress(f"chunks {shape.name}", steps, steps)
    if not found:
        raise EngineError(f"no chunk can be moved: {next(iter(refused.values()), 'nothing was measured')}")
    limits = probing.limits()
    reads: list[Read] = []
    if settings.reading is not None:
        reads, other = measure_reading(engine, texts["held-out"], engine.text, settings.reading, progress)
        refused |= other
    return ChunkCard(
        model=card_model(engine.space),
        probe_layer=limits.layer,
        limits=limits.of,
        measured=tuple(_measured(shape, kind, name, outcomes) for (shape, kind, name), outcomes in found.items()),
        notes={**notes, **_notes(limits, refused)},
        reads=tuple(reads),
    )


def _notes(limits: Limits, refused: Mapping[str, str]) -> dict[str, str]:
    found = {"probes": limits.words}
    if refused:
        found["not possible"] = "; ".join(f"{name}: {why}" for name, why in refused.items())[:1000]
    return found


def _measured(shape: Shape, kind: Kind, repair: str, outcomes: Sequence[Outcome]) -> Measured:
    kl = [outcome.fidelity.kl for outcome in outcomes]
    return Measured(
        repair=repair,
        kind=kind,
        chunks=shape.chunks,
        tokens=shape.width,
        kl=statistics.fmean(kl),
        kl_high=upper_bound(kl),
        top1=statistics.fmean(outcome.fidelity.top1 for outcome in outcomes),
        dnll=statistics.fmean(outcome.fidelity.dnll for outcome in outcomes),
        recomputed=min(1.0, statistics.fmean(outcome.recomputed for outcome in outcomes)),
        windows=len(outcomes),
    )
