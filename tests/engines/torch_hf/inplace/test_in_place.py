"""In-place attention: the contract, generation inside and outside of the engine, and what is refused."""

import numpy as np
import pytest
import torch

from ctxreuse.block.format import parse
from ctxreuse.engines.chunks import InPlaceOps
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import EngineError
from ctxreuse.reuse.inplace import AttachedRun
from ctxreuse.testing.engine import continuation, random_tokens, seal
from ctxreuse.testing.engine.chunk_contexts import relocations_of
from ctxreuse.testing.engine.in_place import EngineInPlaceContract, rows_of
from support.tiny_models import tiny_model

LEVEL = "approx~kl-0.05"


@pytest.mark.parametrize("engine", ["llama", "qwen2", "gemma3", "mistral"], indirect=True, scope="class")
class TestTiny(EngineInPlaceContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request, engine_of):
        return engine_of(request.param, full_kv_for_windows=True)


@pytest.fixture(scope="module")
def llama(engine_of):
    return engine_of("llama")


def attached(engine, format="stored", count=64, reserve=0):
    """A context of 5 computed tokens and a run behind them."""
    ids = random_tokens(engine, 80)
    blocks = [parse(data) for data in seal(engine, ids).blocks]
    context = engine.new_context(reserve)
    engine.prefill(context, random_tokens(engine, 5, seed=1))
    pinned = engine.chunks.pin_run(rows_of(blocks, 3, count), format)
    engine.chunks.attach(context, pinned.tokens, [AttachedRun(5, pinned, 0, count)], LEVEL)
    return context


def test_transformers_own_generate_runs_on_attached_runs(llama):
    question = random_tokens(llama, 6, seed=2)
    context = attached(llama)
    seen = continuation(llama, context, llama.prefill(context, question), 8)
    expected = [int(logits.argmax()) for logits in seen]
    context = attached(llama, reserve=200)
    prompt = torch.from_numpy(np.concatenate([context.tokens, question]).astype(np.int64))[None]
    out = llama.model.generate(
        prompt, past_key_values=context.cache, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert out[0, prompt.shape[1] :].tolist() == expected


def test_without_room_transformers_own_generate_says_so(llama):
    context = attached(llama)
    prompt = torch.from_numpy(np.concatenate([context.tokens, random_tokens(llama, 400)]).astype(np.int64))[None]
    with pytest.raises(EngineError, match="reserve"):
        llama.model.generate(prompt, past_key_values=context.cache, max_new_tokens=2, pad_token_id=0)


def test_a_long_context_takes_memory_for_what_it_computes_only(llama):
    context = attached(llama, "int8", 64)
    rows = context.in_place.rows
    llama.prefill(context, random_tokens(llama, 700, seed=3))
    assert (rows, context.in_place.rows) == (5, 705)
    context.check()
    assert context.lease.arena.capacity < 1100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_pinned_unchanged(dtype, tiny):
    engine = TorchEngine(tiny("llama").to(dtype), block_tokens=16, chunk=64)
    question = random_tokens(engine, 6, seed=2)
    context = attached(engine)
    one = engine.prefill(context, question)
    ids = random_tokens(engine, 80)
    twin = engine.new_context()
    engine.prefill(twin, context.tokens[:5])
    blocks = [parse(data) for data in seal(engine, ids).blocks]
    engine.chunks.insert_rows(twin, ids[3:67], list(relocations_of(blocks, 3, 64, 5)), LEVEL)
    two = engine.prefill(twin, question)
    assert np.abs(one - two).max() <= 0.05 * np.abs(two).max()


def test_int4_needs_heads_in_groups(llama):
    with pytest.raises(EngineError, match="int8"):
        attached(llama, "int4")


def test_a_model_that_changes_what_its_cache_gives_is_found_out(engine_of, monkeypatch):
    engine = engine_of("llama")
    context = attached(engine)
    layer = context.cache.layers[0]
    update = layer.update
    monkeypatch.setattr(
        layer, "update", lambda *args, **kwargs: tuple(part.clone() for part in update(*args, **kwargs))
    )
    with pytest.raises(EngineError, match="changes what its cache gives"):
        engine.prefill(context, random_tokens(engine, 1))


def test_models_with_states_hold_nothing(engine_of):
    engine = engine_of("gemma3")
    assert isinstance(engine.chunks, InPlaceOps)
    blocks = [parse(data) for data in seal(engine, random_tokens(engine, 32)).blocks]
    with pytest.raises(EngineError, match="full_kv_for_windows"):
        engine.chunks.pin_run(rows_of(blocks, 0, 16))


def test_the_window_of_a_models_config_holds_where_a_kernel_computes_its_layers():
    """Mistral's layers have none of their own, and in bfloat16 the kernel calls attention for them."""
    wide = TorchEngine(tiny_model("mistral"), block_tokens=16, full_kv_for_windows=True)
    engine = TorchEngine(tiny_model("mistral").bfloat16(), block_tokens=16, full_kv_for_windows=True)
    question = random_tokens(wide, 6, seed=2)
    expected, found = (one.prefill(attached(one), question) for one in (wide, engine))
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
