"""Bits of planes that are coded as one: what ideal coders take, and what they take at a divergence between two."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.layers import bits_at, prices


@pytest.mark.parametrize("step", [0.1, 0.4])
def test_prices_are_those_of_what_was_learnt(step: float) -> None:
    rng = np.random.default_rng(1)
    learnt = (rng.standard_normal((20_000, 3)) * (0.1, 1, 4)).astype(np.float32)
    price = prices(learnt, step)
    assert price.shape == (3, 129)
    np.testing.assert_allclose(np.exp2(-price.astype(float)).sum(1), 1, atol=1e-3)
    q = np.rint(learnt / np.float32(step)).astype(int)
    for column in range(2):
        counts = np.bincount(q[:, column] + 64, minlength=129)
        share = counts[counts > 0] / len(q)
        entropy = float(-(share * np.log2(share)).sum())
        paid = float(price[column, q[:, column] + 64].mean())
        assert entropy <= paid < entropy + 0.05


def test_bits_between_measured_divergences() -> None:
    curve = [(0.1, 0.25), (0.001, 2.5), (0.01, 1.0)]
    assert bits_at(curve, 0.01) == pytest.approx(1.0)
    assert bits_at(curve, 10**-1.5) == pytest.approx(0.5)
    assert bits_at(curve, 0.0001) is None
    assert bits_at([], 0.01) is None
