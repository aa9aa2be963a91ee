"""SmolLM2 with a card made here from little text: what a level promises holds on text that nobody learnt from."""

from __future__ import annotations

from typing import Any

import pytest

from ctxreuse.bench.rate.curve import Point, at_divergence
from ctxreuse.bench.rivals import RIVALS

#: What a plain uniform quantiser with entropy coding takes at this divergence on this model.
TARGET, BAR = 0.0102, 3.13


@pytest.fixture(scope="module")
def engine(smollm2_card: bytes) -> Any:
    """The engine with the codec of a card from six windows of text."""
    from ctxreuse.codec import Codec, card_digest, read_card
    from ctxreuse.engines import open_engine

    engine = open_engine("smollm2", dtype="float32")
    assert engine.text is not None
    engine.codec = Codec(engine.space, (card_digest(smollm2_card).hex(), read_card(smollm2_card)))
    return engine


@pytest.mark.model
@pytest.mark.timeout(900)  # a minute where nothing else runs; many on a busy machine
def test_the_level_keeps_its_promise_in_fewer_bits_than_any_rival(engine: Any) -> None:
    from ctxreuse.bench.rate.context import CODED, SCORED, Context
    from ctxreuse.bench.rate.texts import held_out, tokens_of
    from ctxreuse.engines.torch_hf.fisher import TorchGauge

    ids = tokens_of(engine.text, held_out()["pydoc topics"], CODED + SCORED + 1)
    assert ids is not None
    context = Context(engine, TorchGauge(engine).rotaries(), ids)
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
