"""Tokens that stand anywhere in a context, by the project's kernels and by torch: the same."""

import numpy as np
import pytest
import torch

from ctxreuse.block.format import parse
from ctxreuse.cpu import cpu_features
from ctxreuse.engines.torch_hf import TorchEngine, attention
from ctxreuse.engines.torch_hf.linears import computes_all
from ctxreuse.testing.engine import random_tokens, seal
from ctxreuse.testing.engine.chunk_contexts import relocations_of
from support.tiny_models import tiny_model

LEVEL = "approx~kl-0.05"
#: Largest difference of logits of some 3, by rounding alone: kernels round weights of attention, torch scores.
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.15}


def recomputed(engine):
    """Logits after every third relocated row was computed again, and after a look at them past gaps."""
    ids, suffix = random_tokens(engine, 96), random_tokens(engine, 9, seed=1)
    blocks = [parse(data) for data in seal(engine, ids).blocks]
    context = engine.new_context()
    engine.prefill(context, random_tokens(engine, 5, seed=2))
    engine.chunks.insert_rows(context, ids, list(relocations_of(blocks, 8, 80, 13)), LEVEL)
    gaps = [at for start, end in context.gaps for at in range(start, end)]
    seen = engine.chunks.attention(context, np.arange(20, 60, dtype=np.int32), suffix, queries=20, layers=2)
    rows = np.union1d(np.arange(13, 93, 3), gaps).astype(np.int32)
    return engine.chunks.recompute_rows(context, rows, suffix), seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "mistral"])
def test_kernels_compute_scattered_tokens_as_torch_does(name, dtype, monkeypatch):
    engine = TorchEngine(tiny_model(name).to(dtype), block_tokens=16, chunk=32, full_kv_for_windows=True)
    calls, kernel = [], attention.attend_rows
    monkeypatch.setattr(attention, "attend_rows", lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs))
    logits, seen = recomputed(engine)
    # In float32 only where the kernels compute the products too; not at all where torch has AMX for bfloat16.
    wanted = dtype == torch.bfloat16 or computes_all(dtype)
    able = "amx_bf16" not in cpu_features() and attention.attend_name(16) in ("avx512", "avx2")
    assert bool(calls) == (wanted and able)
    monkeypatch.setattr(attention, "_attend_slice", lambda *args: None)
    plain, looked = recomputed(engine)
    assert np.abs(logits - plain).max() < TOLERANCE[dtype]
    assert np.abs(seen - looked).max() < TOLERANCE[dtype]
