"""Attention of one query a context: as the kernels for any number of queries, whatever the table and the type."""

import numpy as np
import pytest

from ctxreuse import kernels
from ctxreuse.kernels.attention import Part, Plane, attend
from ctxreuse.kernels.convert import from_float32, to_float32
from ctxreuse.kernels.decode import attend_each


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("table", kernels.available())
def test_each_context_is_as_if_alone(name, table):
    kernels.use(table)
    rng, short = np.random.default_rng(3), {"float32": "fp32", "bfloat16": "bf16"}[name]

    def stored(*shape):
        x = rng.normal(size=shape).astype(np.float32)
        return x if short == "fp32" else from_float32(x, short).view(np.uint16)

    # Rows of memory with room behind them, as contexts have it.
    counts = (1, 70, 300)
    rooms = [[stored(3, count + 5, 32) for count in counts] for _ in "kv"]
    keys, values = ([room[:, :count] for room, count in zip(of, counts)] for of in rooms)
    q = stored(len(counts), 9, 32)
    o = np.zeros_like(q)
    attend_each(q, o, name, keys, values, name, scale=0.2, threads=3)
    for i, (k, v) in enumerate(zip(keys, values)):
        one = to_float32(q[i], short)[:, None] if short == "bf16" else q[i][:, None]
        expected = attend(one, [Part(Plane(short, k), Plane(short, v))], scale=0.2).o[:, 0]
        assert np.array_equal(o[i], expected if short == "fp32" else from_float32(expected, short).view(np.uint16))


def test_what_does_not_fit_is_refused():
    q, k = np.zeros((1, 4, 16), np.float32), np.zeros((2, 5, 16), np.float32)
    o = np.zeros_like(q)
    attend_each(q, o, "float32", [k], [k], "float32", scale=1.0)
    for keys, values in (([k], []), ([k, k], [k, k]), ([k], [k[:, :4]]), ([k], [k[..., ::2]]), ([k[:1]], [k])):
        with pytest.raises(ValueError):
            attend_each(q, o, "float32", keys, values, "float32", scale=1.0)
    for wrong in (q[:, :3], q[..., ::2], q.astype(np.float64)):
        with pytest.raises(ValueError):
            attend_each(wrong, np.zeros_like(wrong), "float32", [k], [k], "float32", scale=1.0)
