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
    looks = np.array([40, 41, 90], np.int32)
    found = engine.attention(live, np.arange(96, dtype=np.int32), looks, suffix)

    model = tiny(name)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        wide = torch.from_numpy(np.concatenate([ids, suffix]).astype(np.int64))[None]
        told = model(wide, output_attentions=True, use_cache=False).attentions
    queries = [*looks.tolist(), *range(96, 103)]
    expected = sum(layer[0, :, queries].sum((0, 1)) for layer in told)[:96].numpy()
    assert np.abs(found - expected).max() <= 1e-4 * expected.max()
    assert live.n == 96


def test_a_look_over_gaps_and_moved_rows_is_that_of_a_context_computed_so(engine_of):
    """In pieces: the suffix is longer than what the engine computes at once."""
    engine, small = engine_of("llama"), engine_of("llama", chunk=16)
    ids, suffix = random_tokens(engine, 64), random_tokens(engine, 50, seed=1)
    found = []
    for one in (engine, small):
        blocks = [parse(data) for data in seal(one, ids).blocks]
        live = one.start()
        one.prefill(live, ids[:5])
        one.place(live, ids, list(moves_of(blocks, 8, 48, 13)), LEVEL)
        assert live.gaps == ((5, 13), (61, 69))
        rows = np.arange(live.n, dtype=np.int32)
        found.append(one.attention(live, rows, np.array([20, 68], np.int32), suffix))
        assert live.gaps == ((5, 13), (61, 69))
        # What is held in gaps is of no matter.
        one.mend(live, np.array([*range(5, 13), *range(61, 69)], np.int32), suffix[:1])
        one.crop(live, 69)
        again = one.attention(live, rows, np.array([20, 68], np.int32), suffix)
        assert np.abs(again - found[-1]).max() <= 1e-3 * again.max()
    assert np.abs(found[0] - found[1]).max() <= 1e-4 * found[0].max()


def test_models_that_keep_states_cannot_look(engine_of):
    engine = engine_of("gemma3")
    live = engine.start()
    engine.prefill(live, random_tokens(engine, 9))
    with pytest.raises(EngineError, match="states"):
        engine.attention(live, np.array([1], np.int32), np.zeros(0, np.int32), random_tokens(engine, 2))


def test_half_types_look_alike(tiny, engine_of):
    full, half = engine_of("llama"), TorchEngine(tiny("llama").to(torch.bfloat16), block_tokens=16, chunk=64)
    ids, suffix, found = random_tokens(full, 64), random_tokens(full, 9, seed=1), []
    for engine in (full, half):
        live = engine.start()
        engine.prefill(live, ids)
        found.append(engine.attention(live, np.arange(64, dtype=np.int32), np.zeros(0, np.int32), suffix))
    assert np.abs(found[0] - found[1]).max() <= 0.05 * found[0].max()
