"""Attention block by block is torch's own, whatever the mask."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.engines.torch_hf.chunks.blockwise import Blockwise
from support.examples import examples


def masks(rng, kind, tokens, keys):
    """An additive mask [1, 1, tokens, keys] that lets every token see one key at least."""
    at = np.sort(rng.choice(keys, tokens, replace=False))
    columns = np.arange(keys)
    allowed = columns[None] <= at[:, None]
    if kind == "window":
        allowed &= columns[None] > at[:, None] - 9
    if kind == "any":
        allowed = rng.random((tokens, keys)) < 0.3
        allowed[np.arange(tokens), at] = True
    bias = np.where(rng.random((tokens, keys)) < 0.5, rng.standard_normal((tokens, keys)), 0) if kind == "bias" else 0.0
    return torch.from_numpy(np.where(allowed, bias, -np.inf).astype(np.float32))[None, None]


@examples("normal")
@given(
    kind=st.sampled_from(["causal", "window", "any", "bias"]),
    tokens=st.integers(1, 90),
    more=st.integers(0, 80),
    kinds=st.integers(1, 3),
    group=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_it_is_what_torch_computes(kind, tokens, more, kinds, group, seed):
    rng, keys = np.random.default_rng(seed), tokens + more

    def numbers(*shape):
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    # As a model gives them: heads side by side, and planes with room behind what they hold.
    query = numbers(1, tokens, kinds * group, 8).transpose(1, 2)
    key, value = numbers(1, kinds, keys + 5, 8)[:, :, :keys], numbers(1, kinds, keys + 5, 6)[:, :, :keys]
    blockwise = Blockwise()
    # Layers share a mask, or have another one.
    for mask in (masks(rng, kind, tokens, keys), masks(rng, "causal", tokens, keys)):
        for scale in (0.3, 1.0):
            wide = [plane.repeat_interleave(group, 1) for plane in (key, value)]
            right = torch.nn.functional.scaled_dot_product_attention(query, *wide, attn_mask=mask, scale=scale)
            found = blockwise.attend(query, key, value, mask, scale)
            assert found.shape == (1, tokens, kinds * group, 6)
            assert float((found - right.transpose(1, 2)).abs().max()) < 2e-6
