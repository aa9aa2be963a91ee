"""Rows at other positions: the contract of moving, windows that keep all tokens, and what cannot be moved."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxreuse.block import parse
from ctxreuse.engines.moving import Move, Mover
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import EngineError
from ctxreuse.levels import EXACT
from ctxreuse.testing.engine import continuation, random_tokens, seal, views
from ctxreuse.testing.engine_moving import EngineMovingContract
from ctxreuse.testing.moving import moves_of

LEVEL = "approx~kl-0.05"


@pytest.mark.parametrize("engine", ["llama", "qwen2", "gemma3", "mistral"], indirect=True, scope="class")
class TestTiny(EngineMovingContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request, engine_of):
        return engine_of(request.param, whole=True)


class TestPositionsInTheTokens(EngineMovingContract):
    relative = False

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, engine_of):
        return engine_of("gpt2")


@pytest.fixture(scope="module")
def llama(engine_of):
    return engine_of("llama")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_turned_too(dtype, tiny):
    engine = TorchEngine(tiny("llama").to(dtype), block_tokens=16, chunk=64)
    ids = random_tokens(engine, 64)
    blocks = [parse(data) for data in seal(engine, ids).blocks]
    live = engine.start()
    engine.prefill(live, random_tokens(engine, 5, seed=1))
    engine.place(live, ids, list(moves_of(blocks, 0, 64, 5)), LEVEL)
    distance, length = engine.deviations(live, np.arange(5, 69, dtype=np.int32), 0, "k")
    assert (distance <= 1e-4 * length).all()


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_windows_that_keep_all_tokens_give_the_same_logits(name, engine_of):
    usual, whole = engine_of(name), engine_of(name, whole=True)
    assert usual.space.needs_state
    assert not whole.space.needs_state
    assert usual.space.digest != whole.space.digest
    assert {spec.kind for spec in whole.space.layers} == {"full"}
    ids = random_tokens(whole, 150)
    a, b = usual.start(), whole.start()
    for at, stop in ((0, 20), (20, 90), (90, 91), (91, 150)):
        one, two = usual.prefill(a, ids[at:stop]), whole.prefill(b, ids[at:stop])
        assert np.abs(one - two).max() <= 1e-5 * np.abs(one).max()
    b.check()
    one, two = continuation(usual, a, one, 30), continuation(whole, b, two, 30)
    assert all(np.abs(x - y).max() <= 1e-5 * np.abs(x).max() for x, y in zip(one, two))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_arrangement_mended_whole_is_a_whole_prefill(data, llama):
    engine = llama
    sources = []
    for seed in range(3):
        ids = random_tokens(engine, 64, seed=seed)
        sources.append((ids, [parse(block) for block in seal(engine, ids).blocks]))
    live = engine.start()
    head = data.draw(st.integers(0, 20))
    if head:
        engine.prefill(live, random_tokens(engine, head, seed=9))
    covered = np.zeros(head, bool)
    for _ in range(data.draw(st.integers(1, 3))):
        tokens, moves, at = [], [], live.n
        for _ in range(data.draw(st.integers(0, 4))):
            if data.draw(st.booleans()):
                ids, blocks = sources[data.draw(st.integers(0, 2))]
                first = data.draw(st.integers(0, 63))
                count = data.draw(st.integers(1, 64 - first))
                moves += moves_of(blocks, first, count, at)
                tokens.append(ids[first : first + count])
            else:
                tokens.append(random_tokens(engine, data.draw(st.integers(1, 9)), seed=8))
            at += len(tokens[-1])
        engine.place(live, np.concatenate([np.zeros(0, np.int32), *tokens]), moves, LEVEL)
        covered = np.append(covered, np.zeros(at - len(covered), bool))
        for move in moves:
            covered[move.start : move.start + move.count] = True
        live.check()
    if live.n == head:
        return
    assert [p for a, b in live.gaps for p in range(a, b)] == (np.flatnonzero(~covered[head:]) + head).tolist()
    assert [p for a, b in live.moved for p in range(a, b)] == np.flatnonzero(covered).tolist()
    chosen = data.draw(st.lists(st.integers(0, live.n - 1), unique=True))
    before = live.n
    engine.mend(live, np.union1d(chosen, (np.flatnonzero(~covered[head:]) + head)).astype(np.int32), sources[0][0][:2])
    expected = engine.prefill(engine.start(), np.concatenate([live.tokens, [3]]))
    got = engine.mend(live, np.arange(head, live.n, dtype=np.int32), np.array([3], np.int32))
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
    assert {run.level for run in live.levels} == {EXACT}
    live.check()
    assert live.n == before + 3


def test_another_attention_is_refused_with_the_reason(engine_of):
    engine = engine_of("llama", attention="eager")
    assert isinstance(engine, Mover)
    live = engine.start()
    with pytest.raises(EngineError, match="eager"):
        engine.place(live, random_tokens(engine, 5), [], LEVEL)
    engine.prefill(live, random_tokens(engine, 5))
    for call in (
        lambda: engine.mend(live, np.array([2], np.int32), random_tokens(engine, 1)),
        lambda: engine.deviations(live, np.array([2], np.int32), 0, "v"),
    ):
        with pytest.raises(EngineError, match="eager"):
            call()
    assert live.n == 5


@pytest.mark.parametrize("name", ["gemma3", "mistral", "qwen3next", "lfm2", "falconh1", "jamba", "mamba2", "zaya"])
def test_states_begin_empty_behind_what_was_placed(name, engine_of):
    engine = engine_of(name)
    ids = random_tokens(engine, 96)
    sealed = seal(engine, ids)
    blocks, _ = views(engine, sealed, 96)
    live = engine.start()
    engine.prefill(live, ids[:16])
    with pytest.raises(EngineError, match="gaps"):
        engine.place(live, ids[:32], list(moves_of(blocks, 0, 16, 16)), LEVEL)
    engine.place(live, ids[20:60], list(moves_of(blocks, 20, 40, 16)), LEVEL)
    live.check()
    for rows, call in (([17], engine.mend), ([17], lambda live, rows, _: engine.deviations(live, rows, 0, "v"))):
        with pytest.raises(EngineError, match="states"):
            call(live, np.array(rows, np.int32), ids[:2])
    seen = continuation(engine, live, engine.mend(live, ids[:0], ids[:5]), 40)
    assert all(np.isfinite(logits).all() for logits in seen)
    live.check()
    assert [run.level for run in live.levels] == [EXACT, LEVEL]
    # Nobody can load a window that does not reach back far enough, and what is held says that it is not exact.
    assert all(
        at == 16 or engine.export_state(live, sealed.keys[0], sealed.keys[1], at) is not None for at in live.states
    )
    if engine.crop(live, 16):
        again = engine.prefill(live, ids[16:30])
        expected = engine.prefill(engine.start(), ids[:30])
        assert np.abs(again - expected).max() <= 1e-5 * np.abs(expected).max()


def test_an_interrupted_mend_ends_the_context(engine_of, monkeypatch):
    engine = engine_of("llama")
    ids = random_tokens(engine, 64)
    blocks = [parse(data) for data in seal(engine, ids).blocks]
    live = engine.start()
    engine.place(live, ids, [Move(0, blocks[0], 0, 16)], LEVEL)

    def interrupted(*args):
        raise KeyboardInterrupt

    rows = np.arange(16, 64, dtype=np.int32)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.model.layers[1].mlp, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.deviations(live, rows, 2, "v")
    assert engine.deviations(live, rows, 2, "v")[0].shape == (48,)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.model.layers[1].mlp, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.mend(live, rows, ids[:3])
    with pytest.raises(EngineError, match="cannot be used"):
        engine.prefill(live, ids[:3])
