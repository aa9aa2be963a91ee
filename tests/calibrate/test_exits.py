"""Ramps are made from what the model says, and say it more often than a guess does."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import numpy as np
import pytest

from ctxreuse.calibrate.exits import ExitSettings, calibrate_exits, exit_settings
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
