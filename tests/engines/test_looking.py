"""Where a prompt's end looks: the torch engine's figures beside what transformers' own attention tells."""

import numpy as np
import pytest
import torch

from ctxreuse.block import parse
from ctxreuse.engines.moving import Rows
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import EngineError
from ctxreuse.reuse.attend import HeldMove
from ctxreuse.testing.engine import random_tokens, seal
from ctxreuse.testing.moving import moves_of

LEVEL = "approx~kl-0.05"


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "mistral", "gpt2"])
@pytest.mark.parametrize("held", [False, True])
def test_weights_are_those_of_transformers(name, held, tiny, engine_of):
    engine = engine_of(name, whole=True)
    ids, suffix = random_tokens(engine, 96), random_tokens(engine, 7, seed=1)
    live = engine.start()
    if held:
        # Rows held where they were computed are what computing them gives.
        blocks = [parse(data) for data in seal(engine, ids).blocks]
        run = engine.hold([Rows(view, 0, 16) for view in blocks], "stored")
        engine.show(live, ids, [HeldMove(0, run, 0, 96)], LEVEL)
    else:
        engine.prefill(live, ids)
    layers = len(engine.space.layers)
    found = engine.attention(live, np.arange(96, dtype=np.int32), suffix, looks=17, layers=layers)
    early = engine.attention(live, np.arange(96, dtype=np.int32), suffix, looks=17, layers=1)

    model = tiny(name)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        wide = torch.from_numpy(np.concatenate([ids, suffix]).astype(np.int64))[None]
        told = model(wide, output_attentions=True, use_cache=False).attentions
    for one, some in ((found, told), (early, told[:1])):
        expected = sum(layer[0, :, 86:].sum((0, 1)) for layer in some)[:96].numpy()
        assert np.abs(one - expected).max() <= 1e-4 * expected.max()
    assert live.n == 96


def test_a_look_past_gaps_and_new_tokens_is_that_of_a_model_that_does_not_see_them(tiny, engine_of):
    """In pieces as well: more looks than what the engine computes at once."""
    ids, suffix, found = random_tokens(engine_of("llama"), 64), random_tokens(engine_of("llama"), 50, seed=1), []
    for one in (engine_of("llama"), engine_of("llama", chunk=16)):
        blocks = [parse(data) for data in seal(one, ids).blocks]
        live = one.start()
        one.prefill(live, ids[:5])
        one.place(live, ids, list(moves_of(blocks, 8, 48, 13)), LEVEL)
        assert live.gaps == ((5, 13), (61, 69))
        found.append(one.attention(live, np.arange(live.n, dtype=np.int32), suffix, looks=40, layers=1))
    assert np.abs(found[0] - found[1]).max() <= 1e-4 * found[0].max()

    model = tiny("llama")
    model.set_attn_implementation("eager")
    told = np.concatenate([ids[:5], ids, suffix]).astype(np.int64)
    # K of the first layer is a matter of the token alone: all may be computed, if gaps and new tokens are hidden.
    shown = torch.ones(1, len(told), dtype=torch.long)
    shown[0, 5:13] = shown[0, 61:69] = shown[0, 69:79] = 0
    with torch.inference_mode():
        out = model(
            torch.from_numpy(told)[None],
            attention_mask=shown,
            position_ids=torch.arange(len(told))[None],
            output_attentions=True,
            use_cache=False,
        )
    expected = out.attentions[0][0, :, 79:].sum((0, 1))[:69].numpy()
    assert np.abs(found[0] - expected).max() <= 1e-4 * expected.max()


def test_models_that_keep_states_cannot_look(engine_of):
    engine = engine_of("gemma3")
    live = engine.start()
    engine.prefill(live, random_tokens(engine, 9))
    with pytest.raises(EngineError, match="states"):
        engine.attention(live, np.array([1], np.int32), random_tokens(engine, 2), looks=2, layers=1)


def test_half_types_look_alike(tiny, engine_of):
    full, half = engine_of("llama"), TorchEngine(tiny("llama").to(torch.bfloat16), block_tokens=16, chunk=64)
    ids, suffix, found = random_tokens(full, 64), random_tokens(full, 9, seed=1), []
    for engine in (full, half):
        live = engine.start()
        engine.prefill(live, ids)
        found.append(engine.attention(live, np.arange(64, dtype=np.int32), suffix, looks=9, layers=2))
    assert np.abs(found[0] - found[1]).max() <= 0.05 * found[0].max()
