"""Calibration of chunk reuse: cost and accuracy of each recompute policy, and what a wrong run looks like."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ctxreuse.calibrate.bounds import permission_bound, worst_kind
from ctxreuse.calibrate.cases import KINDS, Kind, Shape, cases_by_kind
from ctxreuse.calibrate.chunk_trial import PolicyOutcome, Trial
from ctxreuse.calibrate.gather import Progress
from ctxreuse.calibrate.in_place import FORMATS, InPlaceSettings, measure_in_place
from ctxreuse.calibrate.probing import Limits, Probing
from ctxreuse.calibrate.texts import Texts, in_turn
from ctxreuse.codec import model_digest
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.reuse.profile import ChunkProfile, InPlaceMeasurement, PolicyMeasurement
from ctxreuse.reuse.recompute import parse_policy

__all__ = ["ChunkSettings", "calibrate_chunks", "chunk_settings"]

#: From cheap to dear; the gate takes the cheapest whose bound is within what a request allows.
POLICIES = (
    "rotate",
    "first-4+last-16+every-20+drift",
    "first-4+last-16+every-20+ask-5%+drift",
    "v-15%",
    "first-4+last-16+every-16+ask-10%+drift",
    "first-4+every-8+ask-30%+drift",
)
_QUICK = ("rotate", "first-4+last-16+every-20+drift")
#: Values of all scores of one case, as for levels.
_SCORES = 1 << 25
#: By shape, kind and policy: outcomes with the kinds of their texts.
_Found = dict[tuple[Shape, Kind, str], list[tuple[str, PolicyOutcome]]]


class ChunkSettings(NamedTuple):
    """How much is measured: cases of each shape with each of ``policies``, and in-place attention."""

    shapes: tuple[tuple[Shape, int], ...]
    policies: tuple[str, ...] = POLICIES
    in_place: InPlaceSettings | None = None


def chunk_settings(engine: TorchEngine, *, quick: bool = False) -> ChunkSettings:
    """The usual amounts for a model: fewer scored tokens for a large vocabulary, shorter chunks for a short model."""
    space = engine.space
    scored = min(128, max(32, _SCORES // space.vocab_size))
    wanted = ((4, 128, 5),) if quick else ((4, 192, 10), (8, 256, 5))
    # A source holds about as much as the prompt: a lead, half of the chunks, and another document.
    room = space.max_tokens - scored - 256
    least = space.block_tokens
    shapes = [(Shape(n, min(width, room // n // least * least), scored), count) for n, width, count in wanted]
    if any(shape.width < least for shape, _ in shapes):
        raise ConfigError(
            f"the model has {space.max_tokens} positions, too few to relocate chunks in", where=space.architecture
        )
    most = min(896, (space.max_tokens - 128) // least * least)
    amounts = InPlaceSettings(1, least, most // 2, 16, FORMATS[:1]) if quick else InPlaceSettings(4, least, most, 40)
    return ChunkSettings(tuple(dict(shapes).items()), _QUICK if quick else POLICIES, amounts if most > 0 else None)


def calibrate_chunks(
    engine: TorchEngine, texts: Texts, settings: ChunkSettings, progress: Progress, notes: Mapping[str, str]
) -> ChunkProfile:
    """Measure the chunk profile of a model, with the calls that serve requests.

    Takes the texts that levels are measured on ("held-out"). A policy that the engine cannot follow is left out, so a
    profile may allow little or nothing. Raises ConfigError for too little text or no tokenizer, EngineError if the
    engine cannot relocate rows at all.
    """
    if engine.text is None:
        raise ConfigError("the folder holds no tokenizer.json, so no text can be read", fix="Add the file")
    found: _Found = {}
    probing = Probing(engine.space)
    refused: dict[str, str] = {}
    for shape, count in settings.shapes:
        made = cases_by_kind(texts["held-out"], engine.text, count, shape, engine.space.block_tokens)
        if not made:
            needed = 2 * (shape.tokens + shape.following)
            raise ConfigError(
                f"too little text for chunks of {shape.name} tokens", fix=f"Give {needed:,} tokens, or several files"
            )
        steps, done = len(made) * len(KINDS) * (1 + len(settings.policies)), 0
        for text_kind, case in made:
            progress(f"chunks {shape.name}", done, steps)
            trial = Trial(engine, case)
            for kind in KINDS:
                probing.add(trial, kind)
                done += 1
                for name in settings.policies:
                    progress(f"chunks {shape.name}", done, steps)
                    done += 1
                    if name in refused:
                        continue
                    try:
                        outcome = trial.outcome(parse_policy(name), kind)
                    except EngineError as error:
                        refused[name] = error.what
                        continue
                    found.setdefault((shape, kind, name), []).append((text_kind, outcome))
        progress(f"chunks {shape.name}", steps, steps)
    if not found:
        raise EngineError(f"no chunk can be relocated: {next(iter(refused.values()), 'nothing was measured')}")
    limits = probing.limits()
    reads: list[InPlaceMeasurement] = []
    if settings.in_place is not None:
        reads, other = measure_in_place(engine, in_turn(texts["held-out"]), engine.text, settings.in_place, progress)
        refused |= other
    return ChunkProfile(
        model=model_digest(engine.space),
        probe_layer=limits.layer,
        limits=limits.of,
        measured=tuple(_measured(shape, kind, name, outcomes) for (shape, kind, name), outcomes in found.items()),
        notes={**notes, **_notes(limits, found, refused)},
        in_place=tuple(reads),
    )


def _notes(limits: Limits, found: _Found, refused: Mapping[str, str]) -> dict[str, str]:
    worst = []
    for (shape, kind, name), outcomes in found.items():
        text_kind, kl = worst_kind([of for of, _ in outcomes], [outcome.fidelity.kl for _, outcome in outcomes])
        worst.append(f"{shape.name} {kind} by {name}: {text_kind} {kl:.4f}")
    notes = {"probes": limits.words, "worst kinds of text": "; ".join(worst)[:4000]}
    if refused:
        notes["not possible"] = "; ".join(f"{name}: {why}" for name, why in refused.items())[:1000]
    return notes


def _measured(shape: Shape, kind: Kind, policy: str, found: Sequence[tuple[str, PolicyOutcome]]) -> PolicyMeasurement:
    text_kinds, outcomes = [of for of, _ in found], [outcome for _, outcome in found]
    kl = [outcome.fidelity.kl for outcome in outcomes]
    return PolicyMeasurement(
        policy=policy,
        kind=kind,
        chunks=shape.chunks,
        tokens=shape.width,
        kl=statistics.fmean(kl),
        kl_high=permission_bound(text_kinds, kl),
        top1=statistics.fmean(outcome.fidelity.top1 for outcome in outcomes),
        dnll=statistics.fmean(outcome.fidelity.dnll for outcome in outcomes),
        recomputed=min(1.0, statistics.fmean(outcome.recomputed for outcome in outcomes)),
        windows=len(outcomes),
    )
