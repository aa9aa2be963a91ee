"""Calibration of chunk reuse: right models get cards that allow it, wrong ones are refused by what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from ctxreuse.calibrate.bounds import permission_bound, upper_bound, worst_kind
from ctxreuse.calibrate.cases import KINDS, EvalCase, Shape, eval_cases
from ctxreuse.calibrate.chunk_trial import Trial
from ctxreuse.calibrate.chunks import ChunkSettings, calibrate_chunks, chunk_settings
from ctxreuse.calibrate.in_place import InPlaceSettings
from ctxreuse.calibrate.probing import limit_between
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.reuse import parse_policy
from ctxreuse.reuse.inplace import Selection
from ctxreuse.reuse.profile import ChunkProfile, PolicyMeasurement, read_chunk_profile, write_chunk_profile
from ctxreuse.reuse.quality_gate import QualityGate
from ctxreuse.rope import Rotary

SHAPE = Shape(4, 32, following=24)
SETTINGS = ChunkSettings(((SHAPE, 4),), ("rotate", "v-25%@1"))
ALLOWED = 0.08


@pytest.fixture(scope="module")
def words(texts: Any) -> Any:
    """Enough text for a handful of scenes."""
    kinds = (texts["held-out"][kind][:2] for kind in ("prose", "code", "chat", "tables"))
    return {"held-out": {"all": [text[:2_000] for documents in kinds for text in documents]}}


@pytest.fixture(scope="module")
def sharp(engine_of: Any) -> Callable[..., TorchEngine]:
    """sharp(name) -> a tiny model whose attention looks at few tokens, so that positions matter to it."""

    def make(name: str, **options: Any) -> TorchEngine:
        engine = engine_of(name, **options)
        for key, parameter in engine.model.named_parameters():
            if key.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.data.mul_(4)
            if key == "lm_head.weight":
                parameter.data.mul_(2)
        return engine

    return make


def calibrated(engine: TorchEngine, words: Any, settings: ChunkSettings = SETTINGS) -> ChunkProfile:
    return calibrate_chunks(engine, words, settings, lambda *_: None, {"model": "tiny"})


def best(profile: ChunkProfile, kind: str) -> PolicyMeasurement:
    return min((one for one in profile.measured if one.kind == kind), key=lambda one: one.kl)


@pytest.fixture(scope="module")
def llama(sharp: Any) -> TorchEngine:
    return sharp("llama")


@pytest.fixture(scope="module")
def profile(llama: TorchEngine, words: Any) -> ChunkProfile:
    return calibrated(llama, words)


def test_a_right_model_is_allowed_what_it_was_measured_at(llama: TorchEngine, profile: ChunkProfile) -> None:
    assert read_chunk_profile(write_chunk_profile(profile)) == profile
    assert {(one.kind, one.policy) for one in profile.measured} == {(k, r) for k in KINDS for r in SETTINGS.policies}
    for one in profile.measured:
        assert (one.chunks, one.tokens, one.windows) == (4, 32, 4)
        assert 0 < one.kl < one.kl_high
        # A layer of two for all rows, and all of a quarter of them.
        assert one.recomputed == pytest.approx(0 if one.policy == "rotate" else 0.75)
    for kind in KINDS:
        kl = {one.policy: one.kl for one in profile.measured if one.kind == kind}
        assert kl["v-25%@1"] < kl["rotate"]
    verdict = QualityGate(llama.space, profile).decide(ALLOWED, {"behind"})
    assert verdict.allowed, verdict.reason
    assert verdict.kl <= 0.08
    assert not QualityGate(llama.space, profile).decide(0.001, {"behind"}).allowed


def test_probes_part_right_runs_from_those_of_other_tokens(
    llama: TorchEngine, profile: ChunkProfile, made: EvalCase
) -> None:
    assert "behind" in profile.limits
    trial = Trial(llama, made)
    gate = QualityGate(llama.space, profile)
    rows = np.arange(trial.runs[0].start, trial.runs[-1].end, dtype="<i4")
    for wrong in (False, True):
        distance, length = llama.chunks.deviations(trial.placed("behind", wrong=wrong), rows, profile.probe_layer, "v")
        assert gate.exceeded("behind", float(distance.sum() / length.sum())) == wrong


@pytest.fixture(scope="module")
def made(text: Any, words: Any) -> EvalCase:
    return eval_cases(words["held-out"]["all"], text, 2, SHAPE, 16)[1]


def test_keys_turned_by_the_wrong_angles_are_refused(
    sharp: Any, words: Any, profile: ChunkProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ctxreuse.engines.torch_hf.chunks import rotary

    learn = rotary.learn

    def wrong(*args: Any) -> dict[int, Rotary]:
        right = learn(*args)
        return {i: msgspec.structs.replace(r, inv_freq=r.inv_freq[::-1]) for i, r in right.items()}

    monkeypatch.setattr(rotary, "learn", wrong)
    engine = sharp("llama")
    refused = calibrated(engine, words)
    assert best(refused, "behind").kl > 1.5 * best(profile, "behind").kl
    verdict = QualityGate(engine.space, refused).decide(ALLOWED, {"behind"})
    assert not verdict.allowed
    assert verdict.reason.startswith("refused: not good enough")


def test_windows_that_do_not_see_a_chunk_are_refused_unless_they_are_whole(sharp: Any, words: Any) -> None:
    kl, allowed = {}, {}
    for whole in (False, True):
        engine = sharp("gemma3", full_kv_for_windows=whole)
        made = calibrated(engine, words)
        kl[whole] = best(made, "behind").kl
        allowed[whole] = QualityGate(engine.space, made).decide(0.02, {"behind"}).allowed
    assert kl[False] > 5 * kl[True]
    assert allowed == {False: False, True: True}


def test_recurrent_states_are_refused(sharp: Any, words: Any) -> None:
    engine = sharp("falconh1")
    made = calibrated(engine, words)
    assert {one.policy for one in made.measured} == {"rotate"}  # no row can be recomputed
    assert "states" in made.notes["not possible"]
    assert made.limits == {}
    for max_kl in (0.05, ALLOWED, 5):
        assert not QualityGate(engine.space, made).decide(max_kl, {"behind"}).allowed


def test_learnt_positions_are_refused(sharp: Any, words: Any) -> None:
    engine = sharp("gpt2")
    made = calibrated(engine, words)
    # Its V tell where a token stood: relocated rows look like rows of other tokens.
    assert "behind" not in made.limits
    assert not QualityGate(engine.space, made).decide(5, {"behind"}).allowed


@pytest.fixture
def trial(llama: TorchEngine, made: EvalCase) -> Trial:
    ticks = iter(range(1000))
    return Trial(llama, made, clock=lambda: float(next(ticks)))


def test_computing_everything_anew_is_exact(trial: Trial) -> None:
    for kind in KINDS:
        done = trial.outcome(parse_policy("v-100%@1"), kind)
        assert done.fidelity.kl < 1e-6
        assert done.fidelity.top1 == 1
        assert done.recomputed == pytest.approx(0.5 + 1)
        assert done.seconds == 1
    assert trial.without().kl > trial.outcome(parse_policy("rotate"), "behind").fidelity.kl
    unturned, turned = (trial.outcome(parse_policy(name), "head").fidelity.kl for name in ("none", "rotate"))
    assert unturned > turned


def test_too_little_text_and_too_few_positions(llama: TorchEngine, engine_of: Any) -> None:
    with pytest.raises(ConfigError, match="too little text for chunks of 4 x 32"):
        calibrate_chunks(llama, {"held-out": {"a": ["short"]}}, SETTINGS, lambda *_: None, {})  # type: ignore[typeddict-item]
    shapes = dict(chunk_settings(engine_of("gpt2")).shapes)
    assert all(shape.tokens + shape.following < 512 and shape.width % 16 == 0 for shape in shapes)
    assert chunk_settings(llama, quick=True).policies != chunk_settings(llama).policies


def test_an_engine_that_cannot_move_rows_says_so(llama: TorchEngine, words: Any, monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise EngineError("the model cannot be given positions")

    monkeypatch.setattr(llama.chunks, "insert_rows", refuse)
    with pytest.raises(EngineError, match="no chunk can be relocated: the model cannot be given positions"):
        calibrated(llama, words)


READING = InPlaceSettings(2, 16, 128, 12, (("stored", None), ("int8", None), ("int8", Selection(1 / 4, 4, 1, dense=0))))


def test_reading_held_runs_is_measured_by_format_and_selection(llama: TorchEngine, words: Any) -> None:
    settings = ChunkSettings(((SHAPE, 2),), ("rotate",), READING)
    profile = calibrated(llama, words, settings)
    assert read_chunk_profile(write_chunk_profile(profile)) == profile
    stored, whole, some = profile.in_place
    assert [(read.format, read.tokens, read.windows) for read in profile.in_place] == [
        ("stored", 128, 2), ("int8", 128, 2), ("int8", 128, 2)
    ]  # fmt: skip
    assert stored.kl < 1e-6 < whole.kl < some.kl <= some.kl_high
    gate = QualityGate(llama.space, profile)
    verdict, selection = gate.in_place(5)
    assert selection == READING.formats[2][1]
    assert verdict.kl == some.kl_high
    level = math.ceil(whole.kl_high * 1000) / 1000
    verdict, selection = gate.in_place(round(level, 3))
    assert (verdict.allowed, selection, verdict.level) == (True, None, f"approx~kl-{level:.3f}")
    assert gate.in_place(0.001, "stored")[0].allowed


def test_windows_cannot_be_held_and_the_card_says_so(sharp: Any, words: Any) -> None:
    settings = ChunkSettings(((SHAPE, 1),), ("rotate",), READING)
    profile = calibrated(sharp("gemma3"), words, settings)
    assert profile.in_place == ()
    assert "pinned as int8" in profile.notes["not possible"]


def test_bounds_of_means() -> None:
    assert upper_bound([0.5]) == 1
    assert worst_kind(["prose", "code", "code"], [0.02, 0.01, 0.05]) == ("code", pytest.approx(0.03))
    even = [0.02] * 8
    assert permission_bound(["prose"] * 8, even) == pytest.approx(0.02)
    assert permission_bound(["prose"] * 6 + ["code"] * 2, even[:6] + [0.06] * 2) == pytest.approx(0.06), "a kind's mean"
    assert permission_bound(["prose"] * 8 * 8, even * 7 + even[:7] + [0.2]) == pytest.approx(0.1), "half of one scene"
    assert upper_bound([1, 1, 1]) == 1
    # Student's 90 % quantile for 5 degrees of freedom is 1.476.
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert upper_bound(values) == pytest.approx(3.5 + 1.476 * math.sqrt(3.5 / 6), rel=1e-3)


def test_limits_lie_between() -> None:
    assert limit_between([0.01, 0.04], [0.16, 2.0]) == pytest.approx(0.08)
    assert limit_between([0.01, 0.5], [0.16, 2.0]) == 0.5


def test_scenes_are_of_every_kind_and_the_worst_kind_counts(llama: TorchEngine, texts: Any) -> None:
    kinds = {kind: [texts["held-out"][kind][0][:6_000]] for kind in ("prose", "code", "tables")}
    made = calibrated(llama, {"held-out": kinds}, ChunkSettings(((SHAPE, 3),), ("rotate",)))
    words = made.notes["worst kinds of text"]
    for one in made.measured:
        assert one.windows == 3
        named = next(part for part in words.split("; ") if part.startswith(f"{SHAPE.name} {one.kind} by rotate: "))
        kind, kl = named.rpartition(": ")[2].split()
        assert kind in kinds
        assert one.kl < float(kl) <= one.kl_high + 1e-4
