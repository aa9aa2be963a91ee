"""SmolLM2's chunks at other positions: a small calibration lets them through, and tells wrong runs from right ones."""

from __future__ import annotations

from typing import Any

import pytest

from ctxreuse.calibrate.chunks import ChunkSettings, calibrate_chunks
from ctxreuse.calibrate.scenes import Shape
from ctxreuse.engines import open_engine
from ctxreuse.reuse import Gate

BEST = "first-4+last-16+every-20+drift"


@pytest.mark.model
@pytest.mark.timeout(600)  # 20 s where nothing else runs
def test_smollm2_is_let_through(texts: Any) -> None:
    engine = open_engine("smollm2")
    settings = ChunkSettings(((Shape(3, 128, following=64), 2),), ("none", "rotate", BEST))
    card = calibrate_chunks(engine, texts, settings, lambda *_: None, {})
    kl = {(one.kind, one.repair): one.kl for one in card.measured}
    for kind in ("head", "behind"):
        assert kl[kind, "none"] > kl[kind, "rotate"] > kl[kind, BEST]
        # Runs with keys that were not turned lie above the limit, right ones below.
        assert 0 < card.limits[kind] < 0.2
        assert not Gate(engine.space, card).exceeded(kind, card.limits[kind] / 2)
    assert kl["behind", BEST] < 0.05
    assert Gate(engine.space, card).decide("kl-0.3", {"behind"}).allowed
    assert not Gate(engine.space, card).decide("kl-0.001", {"behind"}).allowed
