"""Modes that forwards of a thread run in: torch's inference mode as typed decorators, and values inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch

__all__ = ["by_kernels", "computes_by_kernels", "inference", "normal", "setting"]

_by_kernels: ContextVar[bool] = ContextVar("ctxreuse_by_kernels", default=False)

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


def by_kernels(wanted: bool) -> AbstractContextManager[None]:
    """Inside, and if ``wanted``, the kernels compute a context alone in float32 too, whose bits are not torch's then.

    torch takes twice as long for four rows as for one, and on some processors twice as long for one.
    """
    return setting(_by_kernels, wanted)


def computes_by_kernels() -> bool:
    """True inside of `by_kernels` on this thread."""
    return _by_kernels.get()
