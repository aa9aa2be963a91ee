"""Gemma 3 270M in float32: resumed before, at and past its 512-token windows, and at a fork."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from ctxreuse import models
from ctxreuse.engines.base import chunk_spans
from ctxreuse.testing.engine import Sealed, continuation, resume

pytestmark = pytest.mark.gemma

TOKENS = 768


@pytest.fixture(scope="module")
def ids(gemma):
    line = "The keeper of Harrow Point wrote the weather in a book every evening, and on day {} he saw {} ships. "
    return gemma.text.encode("".join(line.format(i, i * 7 % 23) for i in range(60)))[:TOKENS]


@pytest.fixture(scope="module")
def plain():
    """plain(ids, cuts) -> logits of transformers' own model and cache, cut there."""
    model = AutoModelForCausalLM.from_pretrained(str(models.resolve("gemma3-270m")), dtype=torch.float32)

    def run(ids, cuts):
        cache, wide = DynamicCache(config=model.config), torch.from_numpy(ids.astype(np.int64))[None]
        with torch.inference_mode():
            for at, stop in cuts:
                where = torch.arange(at, stop)[None]
                out = model(wide[:, at:stop], position_ids=where, past_key_values=cache, logits_to_keep=1)
        return out.logits[0, -1].numpy()

    return run


@pytest.fixture(scope="module")
def whole(gemma, ids):
    return gemma.prefill(gemma.new_context(), ids)


def test_its_layers_are_windows_and_full_ones(gemma):
    kinds = [s.kind for s in gemma.space.layers]
    assert [i for i, kind in enumerate(kinds) if kind == "full"] == [5, 11, 17]
    assert {s.window for s in gemma.space.layers if s.kind == "sliding"} == {512}
    assert gemma.space.token_nbytes == 6144


@pytest.mark.parametrize("end", [64, 448, 512, 576, 704])
def test_resumed_anywhere_it_goes_on_like_the_live_context_and_like_a_whole_prefill(gemma, ids, whole, plain, end):
    context = gemma.new_context()
    gemma.prefill(context, ids[:end])
    sealed = Sealed(gemma, context)
    assert list(sealed.states) == [end]
    expected = continuation(gemma, context, gemma.prefill(context, ids[end:]), 4)
    copy, logits = resume(gemma, sealed, end, ids[end:])
    got = continuation(gemma, copy, logits, 4)
    assert all(np.array_equal(a, b) for a, b in zip(got, expected))
    copy.check()
    if end > 512:
        cuts = [*chunk_spans(0, end, 512), *chunk_spans(end, TOKENS, 512)]
        assert np.abs(logits - plain(ids, cuts)).max() < 1e-4
    # Other cuts round otherwise: plain transformers in float32 is 2e-4 to 5e-4 away from float64 here (scale 31).
    assert np.abs(logits - whole).max() < 1e-3
    assert logits.argmax() == whole.argmax()


def test_a_fork_inside_a_generation_goes_both_ways(gemma, ids):
    context = gemma.new_context()
    logits = gemma.prefill(context, ids[:600])
    seen = continuation(gemma, context, logits, 45)
    assert 640 in context.states
    sealed = Sealed(gemma, context)
    rest = context.tokens[640:].copy()
    _, again = resume(gemma, sealed, 640, rest)
    assert np.abs(again - seen[-1]).max() < 1e-3
    assert int(again.argmax()) == int(seen[-1].argmax())
    _, other = resume(gemma, sealed, 640, ids[:5])
    full = gemma.prefill(gemma.new_context(), np.concatenate([sealed.tokens[:640], ids[:5]]))
    assert np.abs(other - full).max() < 1e-3
    assert gemma.crop(context, 640)
    assert np.array_equal(gemma.prefill(context, rest), again)
