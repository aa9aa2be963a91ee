"""Numeric types of K and V: names, sizes, the codes that kernels take, and the numpy types that hold them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

__all__ = ["BITS", "CODES", "FLOATS", "ITEM_BYTES", "KERNEL_NAMES", "UNSIGNED", "VALUES"]

#: Types that K and V may have.
FLOATS: Final = ("float32", "float16", "bfloat16")
#: What kernels call them.
KERNEL_NAMES: Final = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
#: Their numbers in native code, by both names.
CODES: Final = {name: code for code, pair in enumerate(KERNEL_NAMES.items()) for name in pair}
#: Bytes of one element of each type that a block's planes may hold.
ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1, "int8": 1}
#: Whole numbers by their size in bytes.
UNSIGNED: Final[dict[int, Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
#: Whole numbers that hold the bits of a type: a copy as floats could quieten a NaN.
BITS: Final[dict[str, Any]] = {name: UNSIGNED[ITEM_BYTES[name]] for name in FLOATS}
#: Types that hold the values; numpy has no bfloat16, so these are bits.
VALUES: Final[dict[str, Any]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
