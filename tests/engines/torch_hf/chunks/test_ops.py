"""Rows at other positions: the contract, windows that keep all tokens, and what cannot be relocated."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.block.format import parse
from ctxreuse.block.levels import EXACT
from ctxreuse.engines.chunks import ChunkEngine, Relocation
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import EngineError
from ctxreuse.testing.engine import continuation, random_tokens, seal, views
from ctxreuse.testing.engine.chunk_contexts import relocations_of
from ctxreuse.testing.engine.chunks import EngineChunksContract
from support.examples import examples

LEVEL = "approx~kl-0.05"


@pytest.mark.parametrize("engine", ["llama", "qwen2", "gemma3", "mistral"], indirect=True, scope="class")
class TestTiny(EngineChunksContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request, engine_of):
        return engine_of(request.param, full_kv_for_windows=True)


class TestPositionsInTheTokens(EngineChunksContract):
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
    context = engine.new_context()
    engine.prefill(context, random_tokens(engine, 5, seed=1))
    engine.chunks.insert_rows(context, ids, list(relocations_of(blocks, 0, 64, 5)), LEVEL)
    distance, length = engine.chunks.deviations(context, np.arange(5, 69, dtype=np.int32), 0, "k")
    assert (distance <= 1e-4 * length).all()


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_windows_that_keep_all_tokens_give_the_same_logits(name, engine_of):
    usual, whole = engine_of(name), engine_of(name, full_kv_for_windows=True)
    assert usual.space.needs_state
    assert not whole.space.needs_state
    assert usual.space.digest != whole.space.digest
    assert {spec.kind for spec in whole.space.layers} == {"full"}
    ids = random_tokens(whole, 150)
    a, b = usual.new_context(), whole.new_context()
    for at, stop in ((0, 20), (20, 90), (90, 91), (91, 150)):
        one, two = usual.prefill(a, ids[at:stop]), whole.prefill(b, ids[at:stop])
        assert np.abs(one - two).max() <= 1e-5 * np.abs(one).max()
    b.check()
    one, two = continuation(usual, a, one, 30), continuation(whole, b, two, 30)
    assert all(np.abs(x - y).max() <= 1e-5 * np.abs(x).max() for x, y in zip(one, two))


@examples("heavy")
@given(data=st.data())
def test_any_arrangement_mended_whole_is_a_whole_prefill(data, llama):
    engine = llama
    sources = []
    for seed in range(3):
        ids = random_tokens(engine, 64, seed=seed)
        sources.append((ids, [parse(block) for block in seal(engine, ids).blocks]))
    context = engine.new_context()
    head = data.draw(st.integers(0, 20))
    if head:
        engine.prefill(context, random_tokens(engine, head, seed=9))
    covered = np.zeros(head, bool)
    for _ in range(data.draw(st.integers(1, 3))):
        tokens, moves, at = [], [], context.n
        for _ in range(data.draw(st.integers(0, 4))):
            if data.draw(st.booleans()):
                ids, blocks = sources[data.draw(st.integers(0, 2))]
                first = data.draw(st.integers(0, 63))
                count = data.draw(st.integers(1, 64 - first))
                moves += relocations_of(blocks, first, count, at)
                tokens.append(ids[first : first + count])
            else:
                tokens.append(random_tokens(engine, data.draw(st.integers(1, 9)), seed=8))
            at += len(tokens[-1])
        engine.chunks.insert_rows(context, np.concatenate([np.zeros(0, np.int32), *tokens]), moves, LEVEL)
        covered = np.append(covered, np.zeros(at - len(covered), bool))
        for move in moves:
            covered[move.start : move.start + move.count] = True
        context.check()
    if context.n == head:
        return
    assert [p for a, b in context.gaps for p in range(a, b)] == (np.flatnonzero(~covered[head:]) + head).tolist()
    assert [p for a, b in context.relocated for p in range(a, b)] == np.flatnonzero(covered).tolist()
    chosen = data.draw(st.lists(st.integers(0, context.n - 1), unique=True))
    before = context.n
    engine.chunks.recompute_rows(
        context, np.union1d(chosen, (np.flatnonzero(~covered[head:]) + head)).astype(np.int32), sources[0][0][:2]
    )
    expected = engine.prefill(engine.new_context(), np.concatenate([context.tokens, [3]]))
    got = engine.chunks.recompute_rows(context, np.arange(head, context.n, dtype=np.int32), np.array([3], np.int32))
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
    assert {run.level for run in context.levels} == {EXACT}
    context.check()
    assert context.n == before + 3


def test_another_attention_is_refused_with_the_reason(engine_of):
    engine = engine_of("llama", attention="eager")
    assert isinstance(engine, ChunkEngine)
    context = engine.new_context()
    with pytest.raises(EngineError, match="eager"):
        engine.chunks.insert_rows(context, random_tokens(engine, 5), [], LEVEL)
    engine.prefill(context, random_tokens(engine, 5))
    for call in (
        lambda: engine.chunks.recompute_rows(context, np.array([2], np.int32), random_tokens(engine, 1)),
        lambda: engine.chunks.deviations(context, np.array([2], np.int32), 0, "v"),
    ):
        with pytest.raises(EngineError, match="eager"):
            call()
    assert context.n == 5


@pytest.mark.parametrize("name", ["gemma3", "mistral", "qwen3next", "lfm2", "falconh1", "jamba", "mamba2", "zaya"])
def test_states_begin_empty_behind_what_was_placed(name, engine_of):
    engine = engine_of(name)
    ids = random_tokens(engine, 96)
    sealed = seal(engine, ids)
    blocks, _ = views(engine, sealed, 96)
    context = engine.new_context()
    engine.prefill(context, ids[:16])
    with pytest.raises(EngineError, match="gaps"):
        engine.chunks.insert_rows(context, ids[:32], list(relocations_of(blocks, 0, 16, 16)), LEVEL)
    engine.chunks.insert_rows(context, ids[20:60], list(relocations_of(blocks, 20, 40, 16)), LEVEL)
    context.check()
    for rows, call in (
        ([17], engine.chunks.recompute_rows),
        ([17], lambda context, rows, _: engine.chunks.deviations(context, rows, 0, "v")),
    ):
        with pytest.raises(EngineError, match="states"):
            call(context, np.array(rows, np.int32), ids[:2])
    seen = continuation(engine, context, engine.chunks.recompute_rows(context, ids[:0], ids[:5]), 40)
    assert all(np.isfinite(logits).all() for logits in seen)
    context.check()
    assert [run.level for run in context.levels] == [EXACT, LEVEL]
    # A window that does not reach back far enough cannot be loaded, and the context is marked as not exact.
    assert all(
        at == 16 or engine.export_state(context, sealed.keys[0], sealed.keys[1], at) is not None
        for at in context.states
    )
    if engine.crop(context, 16):
        again = engine.prefill(context, ids[16:30])
        expected = engine.prefill(engine.new_context(), ids[:30])
        assert np.abs(again - expected).max() <= 1e-5 * np.abs(expected).max()


def test_an_interrupted_mend_ends_the_context(engine_of, monkeypatch):
    engine = engine_of("llama")
    ids = random_tokens(engine, 64)
    blocks = [parse(data) for data in seal(engine, ids).blocks]
    context = engine.new_context()
    engine.chunks.insert_rows(context, ids, [Relocation(0, blocks[0], 0, 16)], LEVEL)

    def interrupted(*args):
        raise KeyboardInterrupt

    rows = np.arange(16, 64, dtype=np.int32)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.model.layers[1].mlp, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.chunks.deviations(context, rows, 2, "v")
    assert engine.chunks.deviations(context, rows, 2, "v")[0].shape == (48,)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.model.layers[1].mlp, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.chunks.recompute_rows(context, rows, ids[:3])
    with pytest.raises(EngineError, match="cannot be used"):
        engine.prefill(context, ids[:3])
