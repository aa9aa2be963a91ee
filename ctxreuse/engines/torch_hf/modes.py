"""Modes that forwards of a thread run in: torch's inference mode as typed decorators, and values inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch

__all__ = ["computes_few", "few_rows", "inference", "normal", "setting"]

_few: ContextVar[bool] = ContextVar("ctxreuse_few_rows", default=False)

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


def few_rows(count: int) -> AbstractContextManager[None]:
    """Inside, several rows of one context are computed by the kernels in float32 too: torch takes twice as long for
    four of them as for one."""
    return setting(_few, count > 1)


def computes_few() -> bool:
    """True inside of `few_rows` on this thread."""
    return _few.get()
