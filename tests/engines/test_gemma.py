"""Gemma 3 270M in float32: resumed before, at and past its 512-token windows, and at a fork."""

import numpy as np
import pytest

from ctxreuse.testing.engine import Sealed, continuation, resume

pytestmark = pytest.mark.gemma

TOKENS = 768


@pytest.fixture(scope="module")
def ids(gemma):
    line = "The keeper of Harrow Point wrote the weather in a book every evening, and on day {} he saw {} ships. "
    return gemma.text.encode("".join(line.format(i, i * 7 % 23) for i in range(60)))[:TOKENS]


@pytest.fixture(scope="module")
def whole(gemma, ids):
    return {end: gemma.prefill(gemma.start(), ids[:end]) for end in (TOKENS,)}


def test_its_layers_are_windows_and_full_ones(gemma):
    kinds = [s.kind for s in gemma.space.layers]
    assert [i for i, kind in enumerate(kinds) if kind == "full"] == [5, 11, 17]
    assert {s.window for s in gemma.space.layers if s.kind == "sliding"} == {512}
    assert gemma.space.token_nbytes == 6144


@pytest.mark.parametrize("end", [64, 448, 512, 576, 704])
def test_resumed_anywhere_it_goes_on_like_the_live_context_and_like_a_whole_prefill(gemma, ids, whole, end):
    live = gemma.start()
    gemma.prefill(live, ids[:end])
    sealed = Sealed(gemma, live)
    assert list(sealed.states) == [end]
    expected = continuation(gemma, live, gemma.prefill(live, ids[end:]), 4)
    copy, logits = resume(gemma, sealed, end, ids[end:])
    got = continuation(gemma, copy, logits, 4)
    assert all(np.array_equal(a, b) for a, b in zip(got, expected))
    assert np.abs(logits - whole[TOKENS]).max() < 1e-4
    copy.check()


def test_a_fork_inside_a_generation_goes_both_ways(gemma, ids):
    live = gemma.start()
    logits = gemma.prefill(live, ids[:600])
    seen = continuation(gemma, live, logits, 45)
    assert 640 in live.states
    sealed = Sealed(gemma, live)
    rest = live.tokens[640:].copy()
    _, again = resume(gemma, sealed, 640, rest)
    assert np.abs(again - seen[-1]).max() < 1e-4
    assert int(again.argmax()) == int(seen[-1].argmax())
    _, other = resume(gemma, sealed, 640, ids[:5])
    full = gemma.prefill(gemma.start(), np.concatenate([sealed.tokens[:640], ids[:5]]))
    assert np.abs(other - full).max() < 1e-4
    assert gemma.crop(live, 640)
    assert np.array_equal(gemma.prefill(live, rest), again)
