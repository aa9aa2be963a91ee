"""SmolLM2 with a card made here from little text: what a level promises holds on text that nobody learnt from."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rate.curve import Point, at_divergence
from benchmarks.rivals import RIVALS

#: What a plain uniform quantiser with entropy coding takes at this divergence on this model.
TARGET, BAR = 0.0102, 3.13


@pytest.mark.model
def test_the_level_keeps_its_promise_in_fewer_bits_than_any_rival(coded_smollm2: Any) -> None:
    engine = coded_smollm2
    from benchmarks.rate.context import CODED, SCORED, Context
    from benchmarks.rate.texts import held_out, tokens_of
    from ctxreuse.engines.torch_hf.fisher import TorchCalibrationModel

    ids = tokens_of(engine.text, held_out()["prose"], CODED + SCORED + 1)
    assert ids is not None
    context = Context(engine, TorchCalibrationModel(engine).rotaries(), ids)
    assert context.fidelity(context.views) == (0.0, 1.0, 0.0)
    fidelity, bits = context.ours(engine.codec, "kl-0.01")
    ours = bits / context.values
    assert fidelity.kl <= 1.3 * TARGET
    assert fidelity.top1 > 0.93
    assert abs(fidelity.dnll) < 0.05
    assert ours <= BAR
    for family in RIVALS:
        if family[0].family == "int8 + zstd":
            continue  # one setting, of 7 bits
        points = []
        for rival in family:
            measured, taken = context.rival(rival)
            points.append(Point(rival.family, rival.setting, taken / context.values, *measured))
        assert at_divergence(points, fidelity.kl).bits > ours, family[0].family
