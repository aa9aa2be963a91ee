"""Flash decoding in Triton: one query a head over K and V of 16 bits, or in int8 with a scale a row.

Split over the rows like ours, merged by torch. Importing this imports triton and torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import triton
import triton.language as tl

__all__ = ["decode"]

_LOG2E: Final = 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    q, k, k_scales, v, v_scales, o, lse, tokens, each, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    head, share, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rows, dims, keys = tl.arange(0, 16), tl.arange(0, DIM), tl.arange(0, BLOCK)
    real = rows < GROUP
    asked = tl.load(q + (head * GROUP + rows)[:, None] * DIM + dims[None, :], mask=real[:, None], other=0.0)
    top = tl.full((16,), -float("inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    sums = tl.zeros((16, DIM), tl.float32)
    for start in range(share * each, tl.minimum(share * each + each, tokens), BLOCK):
        at = start + keys
        inside = at < tokens
        place = (head * tokens + at).to(tl.int64)
        keys_here = tl.load(k + place[:, None] * DIM + dims[None, :], mask=inside[:, None], other=0)
        if CODES:
            scores = tl.dot(asked, tl.trans(keys_here.to(asked.dtype)))
            scores = scores * tl.load(k_scales + place, mask=inside, other=0.0)[None, :]
        else:
            scores = tl.dot(asked, tl.trans(keys_here))
        scores = tl.where(inside[None, :], scores * scale, -float("inf"))
        now = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
        factor = tl.exp2(top - now)
        total = total * factor + tl.sum(weights, 1)
        values = tl.load(v + place[:, None] * DIM + dims[None, :], mask=inside[:, None], other=0)
        if CODES:
            weights = weights * tl.load(v_scales + place, mask=inside, other=0.0)[None, :]
            values = values.to(asked.dtype)
        sums = sums * factor[:, None] + tl.dot(weights.to(asked.dtype), values)
        top = now
    out = ((head * GROUP + rows) * shares + share).to(tl.int64)
    tl.store(o + out[:, None] * DIM + dims[None, :], sums / total[:, None], mask=real[:, None])
    tl.store(lse + out, top + tl.log2(total), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(o, lse, merged, shares, DIM: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    row, which, dims = tl.program_id(0), tl.arange(0, MOST), tl.arange(0, DIM)
    inside = which < shares
    ends = tl.load(lse + row * shares + which, mask=inside, other=-float("inf"))
    weights = tl.exp2(ends - tl.max(ends, 0))
    parts = tl.load(o + (row * shares + which)[:, None] * DIM + dims[None, :], mask=inside[:, None], other=0.0)
    merged_row = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(merged + row * DIM + dims, merged_row)


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: tuple[Any, Any] | None,
    multiprocessors: int,
    *,
    block: int = 64,
    warps: int = 4,
) -> Callable[[], torch.Tensor]:
    """A call that gives o float32 [Hq, D] of q [Hq, D] over k and v [heads, tokens, D], of q's type or int8.

    ``scales``: float32 [heads, tokens] of int8 k and v. The call allocates nothing: it may be recorded into a graph.
    ``block`` rows a step and ``warps`` a program are what one tunes.
    """
    (heads, tokens, dim), query_heads = k.shape, q.shape[0]
    shares = max(1, min(128, 2 * multiprocessors // heads, -(-tokens // (2 * block))))
    each = -(-tokens // (shares * block)) * block
    shares = -(-tokens // each)
    parts = torch.empty((query_heads, shares, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((query_heads, shares), dtype=torch.float32, device=q.device)
    merged = torch.empty((query_heads, dim), dtype=torch.float32, device=q.device)
    k_scales, v_scales = scales or (lse, lse)
    shape = {"GROUP": query_heads // heads, "DIM": dim, "BLOCK": block, "CODES": scales is not None}

    def call() -> torch.Tensor:
        where = (heads, shares)
        scale = dim**-0.5 * _LOG2E
        _decode[where](q, k, k_scales, v, v_scales, parts, lse, tokens, each, scale, **shape, num_warps=warps)
        _merge[(query_heads,)](parts, lse, merged, shares, DIM=dim, MOST=triton.next_power_of_2(shares))
        return merged

    return call
