"""SmolLM2's chunks at other positions: a small calibration lets them through, and tells wrong runs from right ones."""

from __future__ import annotations

from typing import Any

import pytest

from ctxreuse.calibrate.cases import Shape
from ctxreuse.calibrate.chunks import ChunkSettings, calibrate_chunks
from ctxreuse.reuse import QualityGate

BEST = "first-4+last-16+every-20+drift"


@pytest.mark.model
def test_smollm2_is_let_through(smollm2: Any, texts: Any) -> None:
    engine = smollm2
    settings = ChunkSettings(((Shape(3, 128, following=64), 2),), ("none", "rotate", BEST))
    profile = calibrate_chunks(engine, texts, settings, lambda *_: None, {})
    kl = {(one.kind, one.policy): one.kl for one in profile.measured}
    for kind in ("head", "behind"):
        assert kl[kind, "none"] > kl[kind, "rotate"] > kl[kind, BEST]
        # Runs with keys that were not turned lie above the limit, right ones below.
        assert 0 < profile.limits[kind] < 0.2
        assert not QualityGate(engine.space, profile).exceeded(kind, profile.limits[kind] / 2)
    assert kl["behind", BEST] < 0.05
    assert QualityGate(engine.space, profile).decide(0.3, {"behind"}).allowed
    assert not QualityGate(engine.space, profile).decide(0.001, {"behind"}).allowed
