"""torch's inference mode as decorators that keep the types of what they decorate."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["inference", "normal"]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def inference(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Run without autograd, on the calling thread."""
    wrapped: Callable[_Args, _Result] = torch.inference_mode()(function)
    return wrapped


def normal(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Leave inference mode: tensors made inside may be written to anywhere."""
    wrapped: Callable[_Args, _Result] = torch.inference_mode(mode=False)(function)
    return wrapped
