"""The numpy oracle means what PyTorch means, and rotating by an offset means moving a key to another position."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ctxreuse import kernels
from ctxreuse.rope import inverse_frequencies, shift_tables
from oracle.kernels import reference
from support.examples import examples

TORCH = (torch.float32, torch.float16, torch.bfloat16)
Keys = NDArray[np.float64]


def _patterns(dtype: int) -> NDArray[np.unsignedinteger]:
    if dtype:
        return np.arange(65536, dtype=np.uint16)
    random = np.random.default_rng(2).integers(0, 2**32, 100_000, dtype=np.uint32)
    halves = np.arange(65536, dtype=np.uint32)
    around = np.concatenate([(halves << 16) + nudge for nudge in (0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    return np.concatenate([random, around])


@pytest.mark.parametrize("src", [0, 1, 2])
@pytest.mark.parametrize("dst", [0, 1, 2])
def test_reference_converts_as_torch_does(src: int, dst: int) -> None:
    bits = _patterns(src)
    values = torch.from_numpy(bits.copy()).view(TORCH[src])
    want = values.to(TORCH[dst])
    got = torch.from_numpy(reference.convert(bits, src, dst)).view(TORCH[dst])
    nan = torch.isnan(values)
    assert torch.equal(torch.isnan(got), nan)
    integers = torch.int32 if dst == 0 else torch.int16
    assert torch.equal(got[~nan].view(integers), want[~nan].view(integers))


def _rotated(keys: Keys, position: int, inv_freq: NDArray[np.float64], interleaved: bool) -> Keys:
    """RoPE by its definition, as complex numbers turned by position * frequency."""
    half = len(inv_freq)
    out = keys.copy()
    first, second = (out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2]) if interleaved else (
        out[..., :half], out[..., half : 2 * half]
    )  # fmt: skip
    turned = (first + 1j * second) * np.exp(1j * position * inv_freq)
    first[...], second[...] = turned.real, turned.imag
    return out


@examples("normal")
@given(
    position=st.integers(0, 100_000),
    delta=st.integers(-100_000, 100_000),
    rotary=st.sampled_from([8, 30, 64]),
    interleaved=st.booleans(),
    table=st.sampled_from(kernels.available()),
)
def test_shift_moves_a_key(position: int, delta: int, rotary: int, interleaved: bool, table: str) -> None:
    kernels.use(table)
    inv_freq = inverse_frequencies(10_000.0, rotary)
    plain = np.random.default_rng(3).standard_normal((2, 5, 64))
    here = _rotated(plain, position, inv_freq, interleaved).astype(np.float32)
    there = np.empty_like(here)
    cos, sin = shift_tables(inv_freq, delta)
    kernels.rope_shift(there, here, here.shape, cos, sin, dst_dtype="fp32", interleaved=interleaved)
    # fp32 rounds the key, the table and three operations: a few 2^-24 of values up to 4.
    np.testing.assert_allclose(there, _rotated(plain, position + delta, inv_freq, interleaved), atol=4e-6)
    kernels.rope_shift(here, here, here.shape, cos, sin, dst_dtype="fp32", interleaved=interleaved)
    assert here.tobytes() == there.tobytes()


def test_frequencies_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    inv_freq = LlamaRotaryEmbedding(config).inv_freq
    np.testing.assert_allclose(inverse_frequencies(5e5, 64), inv_freq.double().numpy(), rtol=1e-6)


@pytest.mark.parametrize(("theta", "rotary"), [(0.0, 8), (-1.0, 8), (float("nan"), 8), (1e4, 7), (1e4, 0), (1e4, -2)])
def test_frequencies_refuse_nonsense(theta: float, rotary: int) -> None:
    with pytest.raises(ValueError, match="rotary embedding needs"):
        inverse_frequencies(theta, rotary)


@pytest.mark.parametrize("inv_freq", [np.ones((2, 2)), np.array([1.0, np.inf]), np.array([np.nan])])
def test_tables_refuse_nonsense(inv_freq: NDArray[np.float64]) -> None:
    with pytest.raises(ValueError, match="inv_freq must be"):
        shift_tables(inv_freq, 1)
