"""Attention of contexts that decode: one query each, over K and V where they lie, by several threads in one call.

The same kernels as `ctxreuse.kernels.attention`, without what single queries do not need; see there for arithmetic and
threads. ValueError: shapes, types or steps that do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from ctxreuse.dtypes import CODES
from ctxreuse.kernels.dispatch import native

__all__ = ["attend_each"]


def attend_each(
    q: NDArray[Any],
    o: NDArray[Any],
    dtype: str,
    keys: Sequence[NDArray[Any]],
    values: Sequence[NDArray[Any]],
    stored: str,
    *,
    scale: float,
    threads: int = 1,
) -> None:
    """Write softmax(scale * q K^T) V of each context to ``o``.

    q and o [contexts, Hq, D], contiguous, are of ``dtype``; keys and values [Hkv, tokens, D] of each context, D
    contiguous, are of ``stored``, all rows seen. Two-byte types are given as whole numbers with their bits.
    """
    heads = keys[0].shape[0] if keys else 1
    native.attend_each(
        q, o, CODES[dtype], keys, values, CODES[stored], q.shape[1], heads, q.shape[2], scale, 0.0, threads
    )  # fmt: skip
