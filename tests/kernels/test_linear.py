"""Linear layers of few rows: every table and format against doubles, the same bits alone and among others."""

import threading

import numpy as np
import pytest

from ctxreuse import kernels
from ctxreuse.kernels.convert import from_float32, to_float32
from ctxreuse.kernels.linear import Weights, linear, linear_top, quantise_weights


def bits(x):
    return from_float32(x, "bf16").view(np.uint16)


def product(x, weights, threads=1):
    y = np.full((len(x), len(weights.data)), 7, x.dtype)
    linear(x, weights, y, threads)
    return y


def made(rng, format, outputs, inputs, *, bias=False):
    """Weights, and the doubles that they stand for."""
    x = rng.normal(size=(outputs, inputs)).astype(np.float32)
    b = rng.normal(size=outputs).astype(np.float32) if bias else None
    if format == "int8":
        weights = quantise_weights(x, b)
        assert np.abs(weights.data * weights.scales[:, None] - x).max() <= 0.51 * weights.scales.max()
        return weights, weights.data * weights.scales[:, None].astype(np.float64)
    if format == "bf16":
        return Weights(bits(x), None, b), to_float32(bits(x), "bf16").astype(np.float64)
    return Weights(x, None, b), x.astype(np.float64)


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("table", kernels.available())
def test_products_are_right_and_rows_do_not_notice_each_other(format, table):
    kernels.use(table)
    rng = np.random.default_rng(1)
    few = (1, 1, 1), (5, 16, 2), (63, 100, 3), (130, 48, 7), (4, 33, 4), (700, 64, 5)
    for outputs, inputs, rows in (*few, (13, 531, 9), (70, 1100, 19), (24, 1100, 150)):
        weights, values = made(rng, format, outputs, inputs, bias=rows % 2 == 1)
        x = rng.normal(size=(rows, inputs)).astype(np.float32)
        expected = x @ values.T + (0 if weights.bias is None else weights.bias)
        found = product(x, weights, threads=3)
        assert np.abs(found - expected).max() <= 2e-6 * np.abs(x).max() * np.abs(values).sum(1).max()
        for row in range(rows):
            assert np.array_equal(product(x[row : row + 1], weights), found[row : row + 1])
        short = product(bits(x), weights, threads=3)
        exact = product(to_float32(bits(x), "bf16"), weights)
        if format != "bf16":
            assert np.array_equal(short, bits(exact))
        else:  # a processor may multiply them as they are, and adds in another order then
            apart = 2.0**-8 * np.abs(exact) + 1e-6 * np.abs(x).max() * np.abs(values).sum(1).max()
            assert (np.abs(to_float32(short, "bf16") - exact) <= apart).all()
        for row in range(rows):
            assert np.array_equal(product(bits(x[row : row + 1]), weights), short[row : row + 1])


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("table", kernels.available())
def test_the_largest_outputs_are_those_of_all(format, table):
    kernels.use(table)
    rng = np.random.default_rng(4)
    for outputs, inputs, rows in ((1, 1, 1), (2, 16, 3), (64, 100, 2), (65, 48, 1), (700, 33, 5), (90, 600, 12)):
        weights, _ = made(rng, format, outputs, inputs, bias=rows % 2 == 1)
        x = rng.normal(size=(rows, inputs)).astype(np.float32)
        logits = product(x, weights)
        found = linear_top(x, weights, threads=3)
        ordered = np.sort(logits, 1)
        assert np.array_equal(found["index"], logits.argmax(1))
        assert np.array_equal(found["best"], ordered[:, -1])
        assert np.array_equal(found["second"], ordered[:, -2] if outputs > 1 else np.full(rows, -np.inf))
        exact = np.log(np.exp(logits.astype(np.float64)).sum(1))
        assert np.abs(found["total"] - exact).max() <= 1e-5 * (1 + np.abs(exact).max())
        assert np.array_equal(linear_top(x, weights), found)


def test_of_equal_outputs_the_first_is_the_largest_and_what_does_not_fit_is_refused():
    weights = quantise_weights(np.ones((200, 8), np.float32))
    x = np.ones((1, 8), np.float32)
    (found,) = linear_top(x, weights)
    assert (found["index"], found["best"]) == (0, found["second"])
    assert found["total"] == pytest.approx(found["best"] + np.log(200), abs=1e-5)
    assert not np.isfinite(linear_top(np.full((1, 8), np.nan, np.float32), weights)["total"]).any()
    with pytest.raises(ValueError):
        linear_top(np.ones((1, 9), np.float32), weights)
    with pytest.raises(ValueError):
        linear_top(x, Weights(np.ones((0, 8), np.float32)))


def test_calls_from_many_threads_at_once():
    rng = np.random.default_rng(2)
    weights, _ = made(rng, "fp32", 512, 256)
    x = rng.normal(size=(6, 256)).astype(np.float32)
    expected, wrong = product(x, weights), []

    def run():
        wrong.extend(i for i in range(50) if not np.array_equal(product(x, weights, 4), expected))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_does_not_fit_is_refused():
    x, y = np.zeros((2, 8), np.float32), np.zeros((2, 4), np.float32)
    w = np.zeros((4, 8), np.float32)
    linear(x, Weights(w), y)
    codes = w.astype(np.int8)
    for wrong in (
        (x[:, ::2], Weights(w), y),
        (x.astype(np.float64), Weights(w), y),
        (x, Weights(w.T), y),
        (x, Weights(w[:, :7]), y),
        (x, Weights(w), y[:1]),
        (x, Weights(w), y.view(np.int32)),
        (x, Weights(codes), y),
        (x, Weights(codes, np.ones(3, np.float32)), y),
        (x, Weights(w, None, np.ones(5, np.float32)), y),
    ):
        with pytest.raises(ValueError):
            linear(*wrong)
    with pytest.raises(ValueError):
        quantise_weights(np.array([[1, np.inf]], np.float32))
