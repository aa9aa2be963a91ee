"""The kernels of `ctxreuse.cuda.statistics`; importing this imports numba.

``cuda`` must be a name of the module: the simulator puts its own in that place while a kernel runs.
"""

from __future__ import annotations

import math
from typing import Any, Final

from numba import cuda, float32, float64

__all__ = ["THREADS", "channel_sums", "cuda", "row_scores", "token_energy"]

THREADS: Final = 64
"""Threads of a block."""


@cuda.jit  # type: ignore[untyped-decorator]
def channel_sums(x: Any, out: Any, slab: int) -> None:
    """out float64 [slabs, channels]: sums of x [tokens, channels] over each slab of tokens; a thread a channel."""
    c = cuda.grid(1)
    if c < x.shape[1]:
        total = 0.0
        for t in range(cuda.blockIdx.y * slab, min((cuda.blockIdx.y + 1) * slab, x.shape[0])):
            total += x[t, c]
        out[cuda.blockIdx.y, c] = total


@cuda.jit  # type: ignore[untyped-decorator]
def token_energy(x: Any, mean: Any, out: Any) -> None:
    """out float32 [tokens]: mean square of x - mean over the channels; a block a token."""
    part = cuda.shared.array(THREADS, float64)
    token, me = cuda.blockIdx.x, cuda.threadIdx.x
    total = 0.0
    for c in range(me, x.shape[1], THREADS):
        d = x[token, c] - mean[c]
        total += d * d
    part[me] = total
    cuda.syncthreads()
    if me == 0:
        for i in range(1, THREADS):
            total += part[i]
        out[token] = total / x.shape[1]


@cuda.jit  # type: ignore[untyped-decorator]
def row_scores(z: Any, out: Any) -> None:
    """out float32 [rows, 3]: largest, its lead over the second, logsumexp of each row; a block a row."""
    largest = cuda.shared.array(THREADS, float32)
    second = cuda.shared.array(THREADS, float32)
    sums = cuda.shared.array(THREADS, float64)
    row, me = cuda.blockIdx.x, cuda.threadIdx.x
    top, after = -math.inf, -math.inf
    for c in range(me, z.shape[1], THREADS):
        v = z[row, c]
        if v > top:
            after = top
            top = v
        elif v > after:
            after = v
    total = 0.0
    if top > -math.inf:
        for c in range(me, z.shape[1], THREADS):
            total += math.exp(z[row, c] - top)
    largest[me], second[me], sums[me] = top, after, total
    cuda.syncthreads()
    if me == 0:
        for i in range(1, THREADS):
            after = max(min(top, largest[i]), max(after, second[i]))
            top = max(top, largest[i])
        total = 0.0
        for i in range(THREADS):
            if largest[i] > -math.inf:
                total += sums[i] * math.exp(largest[i] - top)
        out[row, 0], out[row, 1], out[row, 2] = top, top - after, top + math.log(total)
