"""Rotates boxes of keys by one shift of their positions; the angles come from `ctxreuse.rope`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ctxreuse.kernels.base import dense, dtype_code
from ctxreuse.kernels.dispatch import native

if TYPE_CHECKING:
    from ctxreuse._native import Memory

__all__ = ["rope_shift"]


def rope_shift(
    dst: Memory,
    src: Memory,
    shape: Sequence[int],
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    dst_dtype: str,
    src_dtype: str | None = None,
    dst_strides: Sequence[int] | None = None,
    src_strides: Sequence[int] | None = None,
    dst_offset: int = 0,
    src_offset: int = 0,
    interleaved: bool = False,
) -> None:
    """Rotate every K vector of a box by one position offset; `dst` may be `src` (in place, same strides and type).

    `cos`, `sin`: r/2 angles from `ctxreuse.rope.shift_tables`, r <= dim; elements from r on are copied. Pairs are
    (i, i + r/2) (GPT-NeoX, Hugging Face), or (2i, 2i + 1) with `interleaved` (GPT-J; llama in GGUF).
    out1 = x1*cos - x2*sin, out2 = x2*cos + x1*sin, in fp32 without fused multiply-add (RoFormer, arXiv 2104.09864,
    eq. 34). A NaN result is the positive quiet NaN. A strided dim passes through a scratch tile: MemoryError if that
    cannot be had.
    """
    to, of = dtype_code(dst_dtype, dst), dtype_code(src_dtype or dst_dtype, src)
    dst_strides = dense(shape) if dst_strides is None else dst_strides
    src_strides = dense(shape) if src_strides is None else src_strides
    c, s = np.ascontiguousarray(cos, dtype=np.float32), np.ascontiguousarray(sin, dtype=np.float32)
    native.rope_shift(dst, to, dst_offset, dst_strides, src, of, src_offset, src_strides, shape, c, s, interleaved)
