"""What surrounds attention in a decoder layer: every table and format against float64; what does not fit."""

import numpy as np
import pytest

from ctxreuse import kernels
from ctxreuse.kernels.convert import from_float32, to_float32
from ctxreuse.kernels.decoder import GATES, DecoderLayer, Norms
from ctxreuse.kernels.linear import Weights, quantise_weights

HEADS, KV_HEADS, DIM, HIDDEN, INNER, ROWS = 3, 2, 10, 37, 45, 5
SHAPES = [
    (HEADS * DIM, HIDDEN), (KV_HEADS * DIM, HIDDEN), (KV_HEADS * DIM, HIDDEN), (HIDDEN, HEADS * DIM),
    (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER),
]  # fmt: skip


def bits(x):
    return from_float32(x, "bf16").view(np.uint16)


def given(rng, format, norms=(0, 1, 2, 3, 4, 5)):
    """Parts, what they stand for as (weights, bias) float64, and norms."""
    parts, values = [], []
    for outputs, inputs in SHAPES:
        x, bias = rng.normal(size=(outputs, inputs)).astype(np.float32) / 8, rng.normal(size=outputs).astype(np.float32)
        if format == "int8":
            parts.append(quantise_weights(x, bias))
            values.append((parts[-1].data * parts[-1].scales[:, None].astype(np.float64), bias))
        else:
            parts.append(Weights(x if format == "fp32" else bits(x), None, bias))
            values.append((x if format == "fp32" else to_float32(bits(x), "bf16").astype(np.float64), bias))
    widths = (HIDDEN, DIM, DIM, HIDDEN, HIDDEN, HIDDEN)
    own = [rng.normal(size=n).astype(np.float32) if i in norms else None for i, n in enumerate(widths)]
    return parts, values, Norms(*own)


def made(parts, norms, **changed):
    return DecoderLayer(
        parts, norms, **{"eps": 1e-5, "heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "gate": "silu", **changed}
    )


def normed(x, weights):
    if weights is None:
        return x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weights


def expected(values, norms, gate, x, cos, sin):
    """q, k, v and what the layer makes of x and q."""

    def multiplied(x, part):
        return x @ part[0].T + part[1]

    h = normed(x.astype(np.float64), norms.enter)
    q, k, v = (multiplied(h, part).reshape(ROWS, -1, DIM) for part in values[:3])
    turned = []
    for heads, weights in ((q, norms.q), (k, norms.k)):
        heads = normed(heads, weights)
        half = np.concatenate([-heads[..., DIM // 2 :], heads[..., : DIM // 2]], -1)
        turned.append(heads * cos[:, None] + half * sin[:, None])
    total = x + normed(multiplied(turned[0].reshape(ROWS, -1), values[3]), norms.attended)
    h = normed(total, norms.mlp)
    g, up = (multiplied(h, part) for part in values[4:6])
    inner = np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
    g = g / (1 + np.exp(-g)) if gate == "silu" else 0.5 * g * (1 + np.tanh(inner))
    return *turned, v, total + normed(multiplied(g * up, values[6]), norms.leave)


def run(layer, x, cos, sin, threads=2):
    """The same by the kernel, of the type of x."""
    qkv = np.zeros((HEADS + 2 * KV_HEADS) * ROWS * DIM, x.dtype)
    layer.enter(x, cos, sin, qkv, ROWS, threads)
    q, k, v = np.split(qkv, [HEADS * ROWS * DIM, (HEADS + KV_HEADS) * ROWS * DIM])
    out = np.zeros_like(x)
    layer.leave(q, x, out, ROWS, threads)
    return *(one.reshape(ROWS, -1, DIM) for one in (q, k, v)), out


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("table", kernels.available())
def test_layers_are_those_of_float64(table, format, gate):
    kernels.use(table)
    rng = np.random.default_rng(3)
    for own in ((0, 1, 2, 3, 4, 5), (0, 4)):
        parts, values, norms = given(rng, format, own)
        layer = made(parts, norms, gate=gate)
        x = rng.normal(size=(ROWS, HIDDEN)).astype(np.float32)
        cos, sin = rng.normal(size=(2, ROWS, DIM)).astype(np.float32)
        for got, of in zip(run(layer, x, cos, sin), expected(values, norms, gate, x, cos, sin)):
            assert np.abs(got - of).max() <= 2e-5 * np.abs(of).max()
        short = [to_float32(bits(one), "bf16") for one in (x, cos, sin)]
        rounded = run(layer, *map(bits, (x, cos, sin)))
        for got, of in zip(rounded, expected(values, norms, gate, *short)):
            assert np.abs(to_float32(got, "bf16") - of).max() <= 0.02 * np.abs(of).max()


def test_a_layer_that_does_not_fit_is_refused():
    rng = np.random.default_rng(5)
    parts, _, norms = given(rng, "fp32")
    swapped = [*parts[:5], parts[6], parts[5]]
    for wrong in (
        lambda: made(swapped, norms),
        lambda: made(parts[:6], norms),
        lambda: made(parts, norms._replace(enter=None)),
        lambda: made(parts, norms._replace(mlp=None)),
        lambda: made(parts, norms._replace(q=norms.enter)),
        lambda: made(parts, norms, heads=HEADS + 1),
        lambda: made(parts, norms, dim=DIM // 2, heads=2 * HEADS, kv_heads=2 * KV_HEADS),
        lambda: made(parts, norms, eps=float("nan")),
        lambda: made([parts[0]._replace(bias=parts[0].bias[:-1]), *parts[1:]], norms),
        lambda: made([parts[0]._replace(data=parts[0].data.astype(np.int8)), *parts[1:]], norms),
        lambda: made([parts[0]._replace(data=parts[0].data.T), *parts[1:]], norms),
        lambda: made([parts[0]._replace(data=parts[0].data.astype(np.float64)), *parts[1:]], norms),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            wrong()


def test_rows_that_do_not_fit_are_refused():
    rng = np.random.default_rng(6)
    parts, _, norms = given(rng, "fp32")
    layer = made(parts, norms)
    x, cos = np.zeros((ROWS, HIDDEN), np.float32), np.zeros((ROWS, DIM), np.float32)
    qkv = np.zeros((HEADS + 2 * KV_HEADS) * ROWS * DIM, np.float32)
    q = qkv[: HEADS * ROWS * DIM]
    fixed = qkv.copy()
    fixed.flags.writeable = False
    for wrong in (
        lambda: layer.enter(x, cos, cos, qkv, ROWS + 1),
        lambda: layer.enter(x, cos, cos, qkv, 0),
        lambda: layer.enter(x, cos, cos, qkv, 2**62),
        lambda: layer.enter(x[:-1], cos, cos, qkv, ROWS),
        lambda: layer.enter(x, cos[:, ::2], cos, qkv, ROWS),
        lambda: layer.enter(x, cos, cos.astype(np.float64), qkv, ROWS),
        lambda: layer.enter(x, cos, cos, qkv[1:], ROWS),
        lambda: layer.enter(x, cos, cos, fixed, ROWS),
        lambda: layer.leave(q[:-1], x, x, ROWS),
        lambda: layer.leave(q, x, x[:, :-1], ROWS),
        lambda: layer.leave(q, x.view(np.int16), x, ROWS),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            wrong()
