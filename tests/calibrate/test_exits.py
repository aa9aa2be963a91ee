"""Ramps are made from what the model says, and say it more often than a guess does."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import numpy as np
import pytest

from ctxreuse.calibrate.exits import ExitSettings, calibrate_exits, exit_settings
from ctxreuse.calibrate.ramp_training import targets_of, train_head
from ctxreuse.calibrate.texts import Texts
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.exits.profile import read_exit_profile, write_exit_profile
from support.early import early_model
from support.tiny_models import tiny_model
from support.tiny_text import tiny_text

SETTINGS = ExitSettings(12, 128, (3, 5), 200)


def quiet(*_: Any) -> None:
    pass


def texts() -> Texts:
    source = inspect.getsource(textwrap)
    third = len(source) // 3
    parts = {"calibration": source[: 2 * third], "validation": "", "held-out": source[2 * third :]}
    return {part: {"code": [text]} for part, text in parts.items()}  # type: ignore[misc]


def test_ramps_say_what_the_model_says() -> None:
    engine = TorchEngine(early_model(), tiny_text(), block_tokens=16)
    profile = calibrate_exits(engine, texts(), SETTINGS, quiet, {"model": "tiny"})
    assert [ramp.depth for ramp in profile.ramps] == [3, 5]
    assert all(ramp.agrees > 0.5 for ramp in profile.ramps), "its last layers change little"
    assert read_exit_profile(write_exit_profile(profile)).notes["windows"] == "12 of 128 tokens"
    again = calibrate_exits(engine, texts(), SETTINGS, quiet, {"model": "tiny"})
    assert all(np.array_equal(a.candidates, b.candidates) for a, b in zip(profile.ramps, again.ramps))
    engine.use_exits(profile)
    assert len(engine.ramps) == 2


def test_what_cannot_be_calibrated_says_why() -> None:
    engine = TorchEngine(early_model(), tiny_text(), block_tokens=16)
    assert exit_settings(engine).depths == (4, 5)
    with pytest.raises(ConfigError, match="too little text"):
        calibrate_exits(engine, {part: {"code": ["short"]} for part in texts()}, SETTINGS, quiet, {})
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        calibrate_exits(TorchEngine(early_model(), None, block_tokens=16), texts(), SETTINGS, quiet, {})
    windowed = TorchEngine(tiny_model("gemma3"), tiny_text(), block_tokens=16)
    with pytest.raises(EngineError, match="sliding windows"):
        calibrate_exits(windowed, texts(), SETTINGS, quiet, {})


def entropies(logits: Any, targets: Any) -> float:
    shifted = logits - logits.max(1, keepdims=True)
    return float(-(targets * (shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))).sum(1).mean())


def test_training_brings_a_head_nearer_to_what_the_model_says_of_other_texts() -> None:
    rng = np.random.default_rng(1)
    rows, map_ = rng.standard_normal((50, 24)).astype(np.float32), rng.standard_normal((24, 24)).astype(np.float32) / 5
    hidden = rng.standard_normal((4000, 24)).astype(np.float32)
    # Half of the directions are noise to the model, so that no map of least squares is the best of heads.
    last = np.tanh(hidden @ map_ * 3) @ (np.diag([1.0] * 12 + [0.0] * 12)).astype(np.float32)
    said, candidates = (last @ rows.T).argmax(1), np.arange(0, 40, dtype=np.int32)
    targets = targets_of(last, said, candidates, rows[:40])
    solved = np.linalg.lstsq(
        np.c_[hidden, np.ones(len(hidden))], last + rng.standard_normal(last.shape) / 4, rcond=None
    )
    head = (solved[0] @ rows[:40].T).astype(np.float32)
    trained = train_head(hidden[:3000], targets[:3000], head)
    before, after = (entropies(hidden[3000:] @ one[:-1] + one[-1], targets[3000:]) for one in (head, trained))
    assert after < 0.97 * before
    assert np.array_equal(trained, train_head(hidden[:3000], targets[:3000], head)), "the same rows give the same head"


def test_targets_are_what_the_model_says_and_doubt_where_no_candidate_is_that() -> None:
    rng = np.random.default_rng(2)
    rows, last = rng.standard_normal((30, 8)).astype(np.float32), rng.standard_normal((500, 8)).astype(np.float32)
    said, candidates = (last @ rows.T).argmax(1), np.arange(20, dtype=np.int32)
    targets = targets_of(last, said, candidates, rows[:20]).astype(np.float64)
    assert targets.sum(1) == pytest.approx(np.ones(500), abs=0.01)
    known = said < 20
    assert np.array_equal(targets[known].argmax(1), said[known])
    assert targets[~known].max() < 0.4 < targets[known].max()


def test_a_head_is_kept_where_training_helps_nothing() -> None:
    rng = np.random.default_rng(3)
    head = rng.standard_normal((9, 12)).astype(np.float32)
    hidden = rng.standard_normal((600, 8)).astype(np.float32)
    logits = hidden @ head[:-1] + head[-1]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    targets = (shares / shares.sum(1, keepdims=True)).astype(np.float16)
    assert np.array_equal(train_head(hidden, targets, head), head)
    assert np.array_equal(train_head(hidden[:3], targets[:3], head), head)
