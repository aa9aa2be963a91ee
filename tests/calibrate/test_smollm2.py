"""Calibration of a real model on a few windows: promises hold roughly, at fewer bits than the older scheme took."""

from __future__ import annotations

import pytest

from ctxreuse.calibrate import DEFAULT_TARGETS
from ctxreuse.codec import read_profile
from ctxreuse.engines import open_for_calibration
from ctxreuse.engines.calibration import CalibrationModel

#: Bits a value at these divergences with keys before rotation, channel means and one table a channel (768 tokens).
BARS = {"kl-0.05": 2.18, "kl-0.01": 3.13, "kl-0.002": 4.14}


@pytest.mark.model
def test_rates_of_a_real_model(smollm2_card: bytes) -> None:
    model, _ = open_for_calibration("smollm2")
    assert isinstance(model, CalibrationModel)
    rotaries = model.rotaries()
    assert len(set(rotaries.values())) == 1
    assert (rotaries[0].style, len(rotaries[0].inv_freq), rotaries[0].inv_freq[0]) == ("half", 32, 1.0)
    assert rotaries[0].inv_freq[31] == pytest.approx(1e5 ** (-31 / 32), rel=1e-6)
    figures = {level.info.name: level.info for level in read_profile(smollm2_card).levels}
    usual = {name for target in DEFAULT_TARGETS for name in target.names}
    assert set(figures) == usual - {"kl-0.1-joint", "kl-0.01-joint"}
    assert figures["kl-0.05-joint"].bits < 0.8 * figures["kl-0.05"].bits
    assert figures["kl-0.05-joint"].kl < 4 * 0.05
    for name, bar in BARS.items():
        assert figures[name].bits < bar
        assert figures[name].kl < 4 * float(name[3:])
    assert figures["kl-0.002"].top1 > 0.93
