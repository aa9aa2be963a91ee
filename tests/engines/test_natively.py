"""Attention of scattered tokens by the native kernels is torch's own, and what they cannot do is left to torch."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxreuse import kernels
from ctxreuse.engines.torch_hf.natively import Natively
from ctxreuse.kernels.attend import attend_name, attend_ready

#: Elsewhere torch attends to everything.
QUICK = attend_ready() and attend_name(16) in ("avx2", "avx512", "neon")


def numbers(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def states(rng, tokens, keys, kinds, group, dim=16):
    """As a model gives them: heads side by side, and planes with room behind what they hold."""
    query = numbers(rng, 1, tokens, kinds * group, dim).transpose(1, 2)
    return query, numbers(rng, 1, kinds, keys + 5, dim)[:, :, :keys], numbers(rng, 1, kinds, keys + 5, dim)[:, :, :keys]


def additive(allowed):
    return torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)[None, None]


def causal(rows, low, keys, window=None):
    columns = torch.arange(keys) + low
    allowed = columns <= rows[:, None]
    return allowed if window is None else allowed & (columns > rows[:, None] - window)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 90),
    more=st.integers(0, 80),
    low=st.integers(0, 7),
    kinds=st.integers(1, 3),
    group=st.integers(1, 3),
    window=st.none() | st.integers(1, 40),
    hide=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_what_torch_computes(tokens, more, low, kinds, group, window, hide, seed):
    rng, keys = np.random.default_rng(seed), tokens + more
    at = np.sort(rng.choice(keys - 1, tokens - 1, replace=False)) if tokens > 1 else np.zeros(0, np.int64)
    rows = torch.from_numpy(np.append(at, keys - 1) + low)
    query, key, value = states(rng, tokens, keys, kinds, group)
    allowed = causal(rows, low, keys, window)
    if hide:  # but every token sees itself
        hidden = torch.from_numpy(rng.random(keys) < 0.4)
        hidden[rows - low] = False
        allowed &= ~hidden
    natively, wide = Natively(rows), [plane.repeat_interleave(group, 1) for plane in (key, value)]
    # Layers share a mask, or have another one.
    for mask, width in ((additive(allowed), window), (additive(causal(rows, low, keys)), None)):
        for scale in (0.3, None):
            right = torch.nn.functional.scaled_dot_product_attention(query, *wide, attn_mask=mask, scale=scale)
            found = natively.attend(query, key, value, mask, scale, width)
            if not QUICK:
                assert found is None
                continue
            assert found.shape == (1, tokens, kinds * group, 16)
            assert float((found - right.transpose(1, 2)).abs().max()) < 2e-6


def test_masks_that_say_something_else_are_left_to_torch():
    rng, rows = np.random.default_rng(3), torch.tensor([3, 9, 30])
    query, key, value = states(rng, 3, 31, 1, 2)
    plain = additive(causal(rows, 0, 31))
    assert (Natively(rows).attend(query, key, value, plain, None, None) is not None) == QUICK
    biased, back, windowed = plain.clone(), plain.clone(), additive(causal(rows, 0, 31, 8))
    biased[0, 0, 2, 4] = 0.5
    back[0, 0, 0, 5] = 0.0  # a token that sees one behind it
    lone = plain.clone()
    lone[0, 0, 1, 2] = -torch.inf  # a row that one token does not see and another does
    for mask, window in ((biased, None), (back, None), (lone, None), (windowed, None), (plain, 8)):
        assert Natively(rows).attend(query, key, value, mask, None, window) is None
    assert (Natively(rows).attend(query, key, value, windowed, None, 8) is not None) == QUICK


def test_other_types_and_machines_without_quick_kernels_are_left_to_torch():
    rng, rows = np.random.default_rng(3), torch.tensor([3, 9, 30])
    query, key, value = states(rng, 3, 31, 1, 2)
    mask = additive(causal(rows, 0, 31))
    half = [part.to(torch.bfloat16) for part in (query, key, value)]
    assert Natively(rows).attend(*half, mask.to(torch.bfloat16), None, None) is None
    assert Natively(rows).attend(query, key, value[..., :8], mask, None, None) is None
    before = kernels.active()
    try:
        kernels.use("generic")
        assert Natively(rows).attend(query, key, value, mask, None, None) is None
    finally:
        kernels.use(before)
