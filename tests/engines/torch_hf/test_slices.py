"""Attention of slices of a prompt in bfloat16: by the project's kernel where a mask hides later tokens only."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from ctxreuse.engines.torch_hf import TorchEngine, attention
from ctxreuse.engines.torch_hf.packed import WINDOW


@pytest.fixture(autouse=True)
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a processor has it, or has no AVX-512, torch's own attention is used; here the project's is, on all."""
    monkeypatch.setattr(attention, "_has_tiles", lambda: False)
    monkeypatch.setattr(attention, "attend_name", lambda _: "avx512")


def masked(queries: int, keys: int, window: int = 0, *, function: object = None) -> torch.Tensor | None:
    causal = sliding_window_causal_mask_function(window) if window else causal_mask_function
    return attention.mask(
        batch_size=1, q_length=queries, kv_length=keys, q_offset=keys - queries, kv_offset=0, dtype=torch.bfloat16,
        mask_function=function or causal, local_size=window or None, allow_is_causal_skip=False,
    )  # fmt: skip


def test_masks_say_what_they_hide() -> None:
    assert getattr(masked(5, 9), WINDOW) == 0
    assert getattr(masked(5, 9, 3), WINDOW) == 3
    assert getattr(masked(5, 9, 100), WINDOW) == 0, "a window that hides nothing is none"
    others = [bidirectional_mask_function, chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))]
    for other in others:
        assert not hasattr(masked(5, 9, function=other), WINDOW)


@pytest.mark.parametrize(("queries", "keys", "window"), [(40, 100, 0), (40, 40, 0), (2, 300, 0), (130, 290, 64)])
@pytest.mark.parametrize(("heads", "of", "dim"), [(9, 3, 64), (4, 1, 80), (2, 2, 12)])
def test_it_is_torchs_within_rounding(queries: int, keys: int, window: int, heads: int, of: int, dim: int) -> None:
    made = torch.Generator().manual_seed(keys)
    q, k, v = (
        torch.randn(1, count, n, dim, generator=made).bfloat16()
        for count, n in ((heads, queries), (of, keys), (of, keys))
    )
    mask = masked(queries, keys, window)
    with torch.inference_mode():
        got, _ = attention.attend(torch.nn.Identity(), q, k, v, mask if queries < keys else None)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=mask.float(), enable_gqa=True
    )
    assert got.shape == (1, queries, heads, dim)
    assert (got.float() - exact.transpose(1, 2)).abs().max() < 0.03


@pytest.mark.model
def test_a_prompt_in_slices_gives_what_torchs_attention_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine.open("smollm2", dtype="bfloat16", threads=1)
    ids = torch.randint(100, 40_000, (400,), generator=torch.Generator().manual_seed(1)).numpy().astype("<i4")
    by_kernel = list[int]()
    kernel = attention._attend_slice

    def counted(*args: object) -> torch.Tensor | None:
        found = kernel(*args)
        by_kernel.append(found is not None)
        return found

    def logits() -> torch.Tensor:
        context = engine.new_context(600)
        engine.prefill(context, ids[:300])
        return torch.from_numpy(engine.prefill(context, ids[300:])).log_softmax(-1)

    monkeypatch.setattr(attention, "_attend_slice", counted)
    ours = logits()
    assert by_kernel
    assert all(by_kernel)
    monkeypatch.setattr(attention, "_has_tiles", lambda: True)
    torchs = logits()
    assert (torchs.exp() * (torchs - ours)).sum() < 0.01
