"""What several folders of tests share because it takes a minute to make."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def smollm2_card() -> bytes:
    """A card of SmolLM2 with all usual levels, from a third of the usual text."""
    from ctxreuse.calibrate import calibrate, default_texts, settings_for
    from ctxreuse.codec import write_card
    from ctxreuse.engines.gauge import open_gauge

    gauge, text = open_gauge("smollm2")
    settings = settings_for(gauge, calibration=6, validation=2, held_out=2)
    return write_card(calibrate(gauge, text, default_texts(), settings, lambda *_: None, {}))
