"""Modes that forwards of a thread run in: torch's inference mode as typed decorators, and values inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch

__all__ = ["inference", "normal", "setting"]

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


@contextmanager
def setting(variable: ContextVar[_Result], value: _Result) -> Iterator[None]:
    """Let a variable have a value inside, on the calling thread."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
