"""One token's attention over int8 rows as a numba kernel; importing this imports numba."""

from __future__ import annotations

import math
from typing import Any, Final

from numba import cuda, float32

__all__ = ["ROWS", "THREADS", "attend_share", "cuda"]

THREADS: Final = 64
"""Threads of a block."""
ROWS: Final = 512
"""Rows of K and V that a block takes at most."""


@cuda.jit  # type: ignore[untyped-decorator]
def attend_share(q: Any, k: Any, k_scales: Any, v: Any, v_scales: Any, scale: float, o: Any, lse: Any) -> None:
    """o float32 [shares, heads, D] and lse [shares, heads] of q [heads, D] over int8 rows [kv heads, rows, D].

    A block a query head and share of ROWS rows: scores, a thread a row; then values, a thread a component.
    """
    weights = cuda.shared.array(ROWS, float32)
    tops = cuda.shared.array(THREADS, float32)
    head, share, me = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    own, first = head // (q.shape[0] // k.shape[0]), share * ROWS
    count = min(ROWS, k.shape[1] - first)
    top = -math.inf
    for i in range(me, count, THREADS):
        dot = 0.0
        for d in range(q.shape[1]):
            dot += q[head, d] * k[own, first + i, d]
        weights[i] = dot * k_scales[own, first + i] * scale
        top = max(top, weights[i])
    tops[me] = top
    cuda.syncthreads()
    for i in range(THREADS):
        top = max(top, tops[i])
    for i in range(me, count, THREADS):
        weights[i] = math.exp(weights[i] - top)
    cuda.syncthreads()
    total = 0.0
    for i in range(count):
        total += weights[i]
    for d in range(me, q.shape[1], THREADS):
        value = 0.0
        for i in range(count):
            value += weights[i] * v_scales[own, first + i] * v[own, first + i, d]
        o[share, head, d] = value / total
    if me == 0:
        lse[share, head] = top + math.log(total)
