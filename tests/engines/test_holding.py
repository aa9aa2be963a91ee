"""Runs attended to where they are held: the contract, generation in and outside of the engine, and what declines."""

import numpy as np
import pytest
import torch

from ctxreuse.block import parse
from ctxreuse.engines.moving import Holder
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import EngineError
from ctxreuse.reuse.attend import HeldMove
from ctxreuse.testing.engine import continuation, random_tokens, seal
from ctxreuse.testing.engine_holding import EngineHoldingContract, rows_of
from ctxreuse.testing.moving import moves_of

LEVEL = "approx~kl-0.05"


@pytest.mark.parametrize("engine", ["llama", "qwen2", "gemma3", "mistral"], indirect=True, scope="class")
class TestTiny(EngineHoldingContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request, engine_of):
        return engine_of(request.param, whole=True)


@pytest.fixture(scope="module")
def llama(engine_of):
    return engine_of("llama")


def shown(engine, format="stored", count=64, reserve=0):
    """A context of 5 computed tokens and a run behind them."""
    ids = random_tokens(engine, 80)
    blocks = [parse(data) for data in seal(engine, ids).blocks]
    live = engine.start(reserve)
    engine.prefill(live, random_tokens(engine, 5, seed=1))
    held = engine.hold(rows_of(blocks, 3, count), format)
    engine.show(live, held.tokens, [HeldMove(5, held, 0, count)], LEVEL)
    return live


def test_transformers_own_generate_runs_on_held_runs(llama):
    question = random_tokens(llama, 6, seed=2)
    live = shown(llama)
    seen = continuation(llama, live, llama.prefill(live, question), 8)
    expected = [int(logits.argmax()) for logits in seen]
    live = shown(llama, reserve=200)
    prompt = torch.from_numpy(np.concatenate([live.tokens, question]).astype(np.int64))[None]
    out = llama.model.generate(
        prompt, past_key_values=live.cache, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert out[0, prompt.shape[1] :].tolist() == expected


def test_without_room_transformers_own_generate_says_so(llama):
    live = shown(llama)
    prompt = torch.from_numpy(np.concatenate([live.tokens, random_tokens(llama, 400)]).astype(np.int64))[None]
    with pytest.raises(EngineError, match="reserve"):
        llama.model.generate(prompt, past_key_values=live.cache, max_new_tokens=2, pad_token_id=0)


def test_a_long_context_takes_memory_for_what_it_computes_only(llama):
    live = shown(llama, "int8", 64)
    rows = live.residents.rows
    llama.prefill(live, random_tokens(llama, 700, seed=3))
    assert (rows, live.residents.rows) == (5, 705)
    live.check()
    assert live.lease.arena.capacity < 1100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_held_as_they_are(dtype, tiny):
    engine = TorchEngine(tiny("llama").to(dtype), block_tokens=16, chunk=64)
    question = random_tokens(engine, 6, seed=2)
    live = shown(engine)
    one = engine.prefill(live, question)
    ids = random_tokens(engine, 80)
    twin = engine.start()
    engine.prefill(twin, live.tokens[:5])
    blocks = [parse(data) for data in seal(engine, ids).blocks]
    engine.place(twin, ids[3:67], list(moves_of(blocks, 3, 64, 5)), LEVEL)
    two = engine.prefill(twin, question)
    assert np.abs(one - two).max() <= 0.05 * np.abs(two).max()


def test_int4_needs_heads_in_groups(llama):
    with pytest.raises(EngineError, match="int8"):
        shown(llama, "int4")


def test_a_model_that_changes_what_its_cache_gives_is_found_out(engine_of, monkeypatch):
    engine = engine_of("llama")
    live = shown(engine)
    layer = live.cache.layers[0]
    update = layer.update
    monkeypatch.setattr(
        layer, "update", lambda *args, **kwargs: tuple(part.clone() for part in update(*args, **kwargs))
    )
    with pytest.raises(EngineError, match="changes what its cache gives"):
        engine.prefill(live, random_tokens(engine, 1))


def test_models_with_states_hold_nothing(engine_of):
    engine = engine_of("gemma3")
    assert isinstance(engine, Holder)
    blocks = [parse(data) for data in seal(engine, random_tokens(engine, 32)).blocks]
    with pytest.raises(EngineError, match="whole"):
        engine.hold(rows_of(blocks, 0, 16))
