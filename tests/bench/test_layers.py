"""Bits of planes that are turned together: what they have in common is paid once, and comes back as near."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.layers import Turned, bits_at


def made(rows: int, seed: int) -> np.ndarray:
    """Components of two planes, [rows, 16], of which the second is nearly the first."""
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((rows, 8), np.float32)
    return np.concatenate([first, first + 0.1 * rng.standard_normal((rows, 8), np.float32)], 1)


def turned(turn: np.ndarray) -> Turned:
    learnt, other = made(4000, 1), made(500, 2)
    return Turned([0, 1], np.ascontiguousarray(turn.T), learnt @ turn, [other @ turn], [np.ones(500, np.float32)])


@pytest.mark.parametrize("step", [0.1, 0.4])
def test_planes_that_say_the_same_take_fewer_bits_together(step: float) -> None:
    learnt, other = made(4000, 1), made(500, 2)
    axes = np.linalg.eigh(learnt.T @ learnt)[1].astype(np.float32)
    found = {}
    for name, turn in (("alone", np.eye(16, dtype=np.float32)), ("together", axes)):
        (bits,), (back,) = turned(turn).coded(step)
        assert back.shape == other.shape
        found[name] = bits, float(np.square(back - other).mean())
    assert found["together"][0] < 0.85 * found["alone"][0]
    assert found["together"][1] < 1.3 * max(found["alone"][1], step**2 / 12)


def test_bits_between_measured_divergences() -> None:
    curve = [(0.1, 0.25), (0.001, 2.5), (0.01, 1.0)]
    assert bits_at(curve, 0.01) == pytest.approx(1.0)
    assert bits_at(curve, 10**-1.5) == pytest.approx(0.5)
    assert bits_at(curve, 0.0001) is None
    assert bits_at([], 0.01) is None
