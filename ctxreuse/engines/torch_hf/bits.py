"""Tensors as what other libraries take, over the same memory."""

from __future__ import annotations

from typing import Any

import torch

from ctxreuse.dtypes import UNSIGNED
from ctxreuse.engines.rows import Bits

__all__ = ["as_integers", "bits_of", "numbers"]

_INTEGERS = {2: torch.int16, 4: torch.int32}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as whole numbers: what other libraries know of all types."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def bits_of(tensor: torch.Tensor) -> Bits:
    """A tensor in the host's memory as unsigned numbers.

    Numbers are copied as bits: a copy through float types could quieten a NaN, and numpy has no bfloat16.
    """
    array: Bits = as_integers(tensor).numpy()
    return array.view(UNSIGNED[array.itemsize])


def numbers(tensor: torch.Tensor) -> Any:
    """A tensor in the host's memory as kernels take it: float32, or the bits of a type of two bytes."""
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy()
