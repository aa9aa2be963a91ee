"""The kernel of `ctxreuse.cuda.statistics`; importing this imports numba.

``cuda`` must be a name of the module: the simulator puts its own in that place while it runs.
"""

from __future__ import annotations

import math
from typing import Any, Final

from numba import cuda, float32, float64

__all__ = ["THREADS", "cuda", "row_scores"]

THREADS: Final = 64
"""Threads of a block."""


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
