"""The attention probe of the torch engine against transformers' own attention weights."""

import numpy as np
import pytest
import torch

from ctxreuse.block.format import parse
from ctxreuse.engines.chunks import BlockRows
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import EngineError
from ctxreuse.reuse.inplace import AttachedRun
from ctxreuse.testing.engine import random_tokens, seal
from ctxreuse.testing.engine.chunk_contexts import relocations_of

LEVEL = "approx~kl-0.05"


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "mistral", "gpt2"])
@pytest.mark.parametrize("in_place", [False, True])
def test_weights_are_those_of_transformers(name, in_place, tiny, engine_of):
    engine = engine_of(name, full_kv_for_windows=True)
    ids, suffix = random_tokens(engine, 96), random_tokens(engine, 7, seed=1)
    context = engine.new_context()
    if in_place:
        # Rows attached at their own positions equal computed ones.
        blocks = [parse(data) for data in seal(engine, ids).blocks]
        run = engine.chunks.pin_run([BlockRows(view, 0, 16) for view in blocks], "stored")
        engine.chunks.attach(context, ids, [AttachedRun(0, run, 0, 96)], LEVEL)
    else:
        engine.prefill(context, ids)
    layers = len(engine.space.layers)
    found = engine.chunks.attention(context, np.arange(96, dtype=np.int32), suffix, queries=17, layers=layers)
    early = engine.chunks.attention(context, np.arange(96, dtype=np.int32), suffix, queries=17, layers=1)

    model = tiny(name)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        wide = torch.from_numpy(np.concatenate([ids, suffix]).astype(np.int64))[None]
        reference = model(wide, output_attentions=True, use_cache=False).attentions
    for one, some in ((found, reference), (early, reference[:1])):
        expected = sum(layer[0, :, 86:].sum((0, 1)) for layer in some)[:96].numpy()
        assert np.abs(one - expected).max() <= 1e-4 * expected.max()
    assert context.n == 96


def test_a_look_past_gaps_and_new_tokens_is_that_of_a_model_that_does_not_see_them(tiny, engine_of):
    """In pieces as well: more looks than what the engine computes at once."""
    ids, suffix, found = random_tokens(engine_of("llama"), 64), random_tokens(engine_of("llama"), 50, seed=1), []
    for one in (engine_of("llama"), engine_of("llama", chunk=16)):
        blocks = [parse(data) for data in seal(one, ids).blocks]
        context = one.new_context()
        one.prefill(context, ids[:5])
        one.chunks.insert_rows(context, ids, list(relocations_of(blocks, 8, 48, 13)), LEVEL)
        assert context.gaps == ((5, 13), (61, 69))
        found.append(one.chunks.attention(context, np.arange(context.n, dtype=np.int32), suffix, queries=40, layers=1))
    assert np.abs(found[0] - found[1]).max() <= 1e-4 * found[0].max()

    model = tiny("llama")
    model.set_attn_implementation("eager")
    whole = np.concatenate([ids[:5], ids, suffix]).astype(np.int64)
    # K of the first layer is a matter of the token alone: all may be computed, if gaps and new tokens are hidden.
    shown = torch.ones(1, len(whole), dtype=torch.long)
    shown[0, 5:13] = shown[0, 61:69] = shown[0, 69:79] = 0
    with torch.inference_mode():
        out = model(
            torch.from_numpy(whole)[None],
            attention_mask=shown,
            position_ids=torch.arange(len(whole))[None],
            output_attentions=True,
            use_cache=False,
        )
    expected = out.attentions[0][0, :, 79:].sum((0, 1))[:69].numpy()
    assert np.abs(found[0] - expected).max() <= 1e-4 * expected.max()


def test_models_that_keep_states_cannot_look(engine_of):
    engine = engine_of("gemma3")
    context = engine.new_context()
    engine.prefill(context, random_tokens(engine, 9))
    with pytest.raises(EngineError, match="states"):
        engine.chunks.attention(context, np.array([1], np.int32), random_tokens(engine, 2), queries=2, layers=1)


def test_half_types_look_alike(tiny, engine_of):
    full, half = engine_of("llama"), TorchEngine(tiny("llama").to(torch.bfloat16), block_tokens=16, chunk=64)
    ids, suffix, found = random_tokens(full, 64), random_tokens(full, 9, seed=1), []
    for engine in (full, half):
        context = engine.new_context()
        engine.prefill(context, ids)
        found.append(engine.chunks.attention(context, np.arange(64, dtype=np.int32), suffix, queries=9, layers=2))
    assert np.abs(found[0] - found[1]).max() <= 0.05 * found[0].max()
