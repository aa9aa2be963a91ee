"""Rotary embedding: tables of positions, of spans, of shifts, and rotation there and back."""

from __future__ import annotations

import numpy as np
import pytest

from ctxreuse.rope import Rotary, RotaryStyle

FREQUENCIES = tuple(10000.0 ** -np.linspace(0, 1, 8))


def test_tables_of_spans_are_those_of_their_positions() -> None:
    rotary = Rotary("half", FREQUENCIES, 1.5)
    far = 1 << 15
    for start, tokens in ((0, 5), (1000, 100), (far - 10, 10), (far - 3, 9), (10**6, 4)):
        by_hand = np.arange(start, start + tokens)[:, None] * np.array(FREQUENCIES)
        for undo, sign, factor in ((False, 1, 1.5), (True, -1, 1 / 1.5)):
            cos, sin = rotary.span_tables(start, tokens, undo=undo)
            assert (cos == (np.cos(by_hand) * factor).astype(np.float32)).all()
            assert (sin == (np.sin(by_hand) * (sign * factor)).astype(np.float32)).all()
            assert not cos.flags.writeable
            assert not sin.flags.writeable
    for i in range(20):
        rotary.span_tables(10**6 + i, 1)
    assert len(rotary._spans._beyond) <= 8
    for start, tokens in ((-1, 2), (2, -1)):
        with pytest.raises(ValueError, match="out of range"):
            rotary.span_tables(start, tokens)


@pytest.mark.parametrize("style", ["half", "pairs", "none"])
def test_shifts_and_rotations_compose(style: RotaryStyle) -> None:
    rotary = Rotary(style, FREQUENCIES if style != "none" else ())
    k = np.random.default_rng(3).normal(size=(2, 5, 20)).astype(np.float32)
    there = rotary.rotate(k, np.arange(40, 45))
    np.testing.assert_allclose(rotary.rotate(there, np.arange(40, 45), undo=True), k, atol=1e-5)
    assert np.array_equal(there[..., 16:], k[..., 16:])
    cos, sin, interleaved = rotary.shift(3)
    assert interleaved == (style == "pairs")
    moved, (first, second) = there.copy(), rotary.pairs
    moved[..., first] = there[..., first] * cos - there[..., second] * sin
    moved[..., second] = there[..., second] * cos + there[..., first] * sin
    np.testing.assert_allclose(moved, rotary.rotate(k, np.arange(43, 48)), atol=1e-5)
