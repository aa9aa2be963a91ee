"""Attention over quantised parts on a real device against float64: the shim's comparisons on longer contexts."""

from __future__ import annotations

import numpy as np
import pytest

from ctxreuse.cuda import Launcher, statistics
from ctxreuse.kernels.attention import Part, attend, quantise
from oracle.cuda.attention import decode_int8
from support.attention import Chunk, compare_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("format", ["int8", "int4", "fp16", "bf16"])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("queries", [1, 2, 32, 64])
def test_every_format_width_and_group(device: Launcher, format: str, dim: int, group: int, queries: int) -> None:
    compare_attention(device, [Chunk(3001, format)], (2 * group, queries, dim), 2, seed=group)


@pytest.mark.parametrize("tokens", [1, 15, 16, 127, 129, 4096, 40_000])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_any_length(device: Launcher, tokens: int, format: str) -> None:
    compare_attention(device, [Chunk(tokens, format)], (8, 1, 128), 1, seed=tokens)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("queries", [1, 40])
def test_chunks_turned_before_a_tail(device: Launcher, queries: int, dtype: type) -> None:
    shifts = [(256, "int8", 700), (300, "int8", -1234), (77, "int4", 31_000), (1024, "int4", 5), (64, "int8", 700)]
    chunks = [Chunk(tokens, format, shift=shift, rotary=0.5) for tokens, format, shift in shifts]
    chunks.append(Chunk(queries + 9, "bf16", at=5000 - 9))
    compare_attention(device, chunks, (12, queries, 128), 4, positions=5000 + np.arange(queries), dtype=dtype)


@pytest.mark.parametrize("window", [None, 1, 100, 2000])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_windows_scattered_rows_and_hidden_ones(device: Launcher, dim: int, window: int | None) -> None:
    random = np.random.default_rng(0)
    hidden = np.unique(random.integers(0, 2000, 300))
    at = np.sort(random.integers(0, 4000, 2000))
    chunks = [
        Chunk(2000, "int8", at=0, hidden=hidden),
        Chunk(2000, "int4", first=7, last=1990, at=at, hidden=hidden),
        Chunk(500, "fp16", at=at[::4].copy(), hidden=np.arange(100, 400)),
    ]
    positions = random.integers(0, 4500, 17)
    compare_attention(device, chunks, (8, 17, dim), 2, positions=positions, window=window, softcap=20.0)


def test_calls_give_the_same_bits_again(device: Launcher) -> None:
    first, second = (compare_attention(device, [Chunk(9000, "int4")], (8, 1, 128), 2) for _ in range(2))
    assert (first.o == second.o).all()
    assert (first.lse == second.lse).all()


def test_the_plain_form_agrees(device: Launcher) -> None:
    assert statistics.on_device()
    random = np.random.default_rng(1)
    q = random.standard_normal((8, 1, 128), np.float32)
    k, v = (quantise(random.standard_normal((2, 3000, 128), np.float32), "int8") for _ in range(2))
    got, want = decode_int8(q, k, v, scale=0.1), attend(q, [Part(k, v)], scale=0.1)
    assert np.abs(got.o - want.o).max() < 1e-3 * np.abs(want.o).max()
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-4)
