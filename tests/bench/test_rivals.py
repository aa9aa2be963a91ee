"""Rivals of the codec: what comes back has the right shape and error, and every bit is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.rivals import PLAIN, RIVALS, CacheGen, Int8Zstd, Kivi, KvQuant, Plain, RotatedLloydMax
from benchmarks.rivals.base import bits_of, table_256
from benchmarks.rivals.kivi import asymmetric
from benchmarks.rivals.kvquant import levels_of
from benchmarks.rivals.rotation import lloyd_max, rotation

ALL = [rival for family in (*RIVALS, PLAIN) for rival in family]
TOKENS, HEADS, DIM = 100, 3, 64


def values(seed: int = 0, spread: float = 1.0) -> Any:
    """Channels with means and spreads of their own, tokens of different length."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((TOKENS, HEADS, DIM)) * np.exp(spread * random.standard_normal((HEADS, DIM)))
    x = x * np.exp(0.3 * random.standard_normal((TOKENS, 1, 1))) + 2 * random.standard_normal((HEADS, DIM))
    return x.astype(np.float32)


def error(rival: Any, x: Any, role: str = "k") -> float:
    """Mean squared error over the variance of the values."""
    return float(((rival.code(x, role, 0, 30).values - x) ** 2).mean() / x.var())


@pytest.mark.parametrize("rival", ALL, ids=lambda rival: f"{rival.family} {rival.setting}")
@pytest.mark.parametrize("role", ["k", "v"])
def test_every_rival(rival: Any, role: str) -> None:
    x = values()
    kept = x.copy()
    coded = rival.code(x, role, 4, 30)
    assert coded.values.shape == x.shape
    assert coded.values.dtype == np.float32
    assert np.array_equal(x, kept)
    assert 1.5 < coded.bits / x.size < 9
    again = rival.code(x, role, 4, 30)
    assert np.array_equal(again.values, coded.values)
    assert again.bits == coded.bits
    assert error(rival, x, role) < 0.35


@pytest.mark.parametrize("rival", ALL, ids=lambda rival: f"{rival.family} {rival.setting}")
def test_nothing_but_zeros(rival: Any) -> None:
    assert not rival.code(np.zeros((TOKENS, HEADS, DIM), np.float32), "k", 0, 30).values.any()


@pytest.mark.parametrize("family", [*RIVALS, PLAIN], ids=lambda family: family[0].family)
def test_more_bits_are_less_error(family: Any) -> None:
    x = values()
    for role in "kv":
        bits = [rival.code(x, role, 25, 30).bits for rival in family]
        errors = [error(rival, x, role) for rival in family]
        assert bits == sorted(bits, reverse=True)
        assert errors == sorted(errors)


def test_kivi_groups_along_tokens_for_keys_and_along_channels_for_values() -> None:
    x = values()
    groups = {"k": 4 * HEADS * DIM, "v": TOKENS * HEADS * DIM // 32}  # the last 4 tokens are a group of their own
    for role, count in groups.items():
        assert Kivi(2).code(x, role, 0, 1).bits == 2 * x.size + 32 * count
    # Half a step of its group, and what float16 makes of minimum and scale, is the most that a value can move.
    back = Kivi(4).code(x, "k", 0, 1).values
    for at in range(0, TOKENS, 32):
        part, got = x[at : at + 32], back[at : at + 32]
        step = (part.max(0) - part.min(0)) / 15
        assert (np.abs(part - got) <= step / 2 + 0.002 * np.abs(part).max(0) + 15 * step * 0.001).all()


def test_asymmetric_keeps_two_levels() -> None:
    row = np.array([[0.5, 0.5, 2.0, 0.5, 7.0]], np.float32)
    back, groups = asymmetric(row, 1, 3)
    assert groups == 2
    assert np.array_equal(back, row)


def test_lloyd_max_levels_are_those_of_the_literature() -> None:
    assert np.allclose(lloyd_max(1), [-np.sqrt(2 / np.pi), np.sqrt(2 / np.pi)], atol=1e-9)
    assert np.allclose(lloyd_max(2), [-1.510, -0.4528, 0.4528, 1.510], atol=1e-3)
    assert np.allclose(lloyd_max(3)[4:], [0.2451, 0.7560, 1.344, 2.152], atol=1e-3)


def test_rotations_keep_length_and_errors_are_those_of_gauss() -> None:
    turn = rotation(DIM)
    assert np.allclose(turn @ turn.T, np.eye(DIM), atol=1e-5)
    x = np.random.default_rng(1).standard_normal((TOKENS, HEADS, DIM)).astype(np.float32)
    # 0.1175, 0.03454 and 0.009497: distortions of N(0, 1) at 2, 3 and 4 bits.
    for bits, distortion in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        rival = RotatedLloydMax(bits)
        assert error(rival, x) == pytest.approx(distortion, rel=0.1)
        assert rival.code(x, "v", 0, 1).bits == bits * x.size + 16 * TOKENS * HEADS
        centred = RotatedLloydMax(bits, centred=True)
        assert centred.code(x, "v", 0, 1).bits == bits * x.size + 16 * TOKENS * HEADS + 16 * HEADS * DIM


def test_centring_helps_where_channels_have_means() -> None:
    x = values()
    assert error(RotatedLloydMax(3, centred=True), x) < 0.9 * error(RotatedLloydMax(3), x)


def test_cachegen_bins_by_layer_and_tables_by_channel() -> None:
    assert [CacheGen(2).bins("k", layer, 30) for layer in (0, 9, 10, 29)] == [32, 32, 16, 16]
    assert [CacheGen(1).bins("v", layer, 30) for layer in (0, 1, 2)] == [16, 16, 12]
    x = values()
    coded = CacheGen(3).code(x, "k", 0, 30)
    free = CacheGen(3, tables=False).code(x, "k", 0, 30)
    assert np.array_equal(coded.values, free.values)
    assert coded.bits - free.bits == pytest.approx(16 * 33 * HEADS * DIM)
    most = np.abs(x).max((1, 2), keepdims=True)
    assert (np.abs(coded.values - x) <= most / 30 + 0.001 * most).all()


def test_int8_moves_a_value_by_half_a_step_at_most() -> None:
    x = values()
    step = np.abs(x).max(-1, keepdims=True) / 127
    coded = Int8Zstd().code(x, "k", 0, 1)
    assert (np.abs(coded.values - x) <= step * 0.51 + 127 * step * 0.001).all()
    # Little variety packs well; the scales still count.
    flat = np.ones_like(x)
    assert 16 * TOKENS * HEADS < Int8Zstd().code(flat, "k", 0, 1).bits < 0.1 * 8 * x.size


def test_plain_steps_are_uniform_and_nothing_is_clipped() -> None:
    x = values()
    x[17, 1, 5] = 400.0
    coded = Plain(0.25).code(x, "k", 0, 1)
    scale = np.sqrt(((x - x.mean(0)) ** 2).mean((1, 2), keepdims=True))
    assert (np.abs(coded.values - x) <= 0.125 * scale * 1.01 + 0.002 * np.abs(x).max()).all()
    without = x.copy()
    without[17, 1, 5] = 0.0
    assert Plain(0.25).code(without, "k", 0, 1).bits != coded.bits


def test_kvquant_keeps_the_far_ones_apart() -> None:
    x = values()
    x[40, 2, 3] = 1000.0
    coded = KvQuant(3).code(x, "k", 0, 1)
    assert coded.values[40, 2, 3] == 1000.0
    apart = (coded.bits - 3 * x.size - 32 * HEADS * DIM - 16 * 8) / 32
    assert apart == int(apart)
    assert 0.005 < apart / x.size < 0.03


def test_k_means_finds_the_clusters() -> None:
    random = np.random.default_rng(3)
    x = np.concatenate([centre + 0.01 * random.standard_normal(500) for centre in (-3.0, 0.0, 1.0, 7.0)])
    assert np.allclose(levels_of(random.permutation(x).astype(np.float32), 4), [-3, 0, 1, 7], atol=0.01)


def test_entropy_and_tables() -> None:
    counts = np.array([[8, 0, 8, 0], [16, 0, 0, 0]])
    assert bits_of(counts) == 16
    shares = table_256(np.array([[9999, 1, 0, 0], [1, 1, 1, 0]]))
    assert np.array_equal(shares.sum(-1), [1, 1])
    assert shares[0].tolist() == [255 / 256, 1 / 256, 0, 0]
    # 8-bit shares cost a little more than the true ones, never less.
    counts = np.random.default_rng(0).integers(0, 1000, (8, 32))
    assert bits_of(counts) < bits_of(counts, table_256(counts)) < 1.01 * bits_of(counts)
