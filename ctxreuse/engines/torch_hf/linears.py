"""Linear layers of few rows by the project's own kernel: a decode step reads the weights once, where they lie.

torch packs the weights of a matrix product in each call. All linear layers of SmolLM2, one thread of a Xeon with AMX,
ms of processor time (torch / this):

  rows                    1          4          8         16         32
  float32         43.1/45.8  78.3/49.5   107/57.6   110/80.7    136/118
  bfloat16        44.3/26.3  49.5/30.7  49.7/53.0  49.2/77.8   49.0/114

In float32 a context that computes alone has the bits of plain transformers, so torch computes it; its product of one
row reads no slower. Kernels compute passes over several contexts, and all of bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch

from ctxreuse.engines.torch_hf.packed import is_packing
from ctxreuse.kernels.linear import Weights, linear, quantise_weights

__all__ = ["few_rows", "install_linears", "numbers", "uses_kernels"]

_few: ContextVar[bool] = ContextVar("ctxreuse_few_rows", default=False)

#: Most rows of a call to the kernel, by the type of weights.
_MOST: Final = {torch.float32: 48, torch.bfloat16: 6}
#: The same where weights are int8: for more they become what the rows are, and go through torch.
_MOST_CODES: Final = 24


def uses_kernels(dtype: torch.dtype) -> bool:
    """True if few tokens of this type are computed by the project's kernels now, on this thread."""
    return (dtype != torch.float32 or is_packing() or _few.get()) and not torch.is_grad_enabled()


@contextmanager
def few_rows(count: int) -> Iterator[None]:
    """Inside, several rows of one context are computed by the kernels in float32 too: torch takes twice as long for
    four of them as for one."""
    token = _few.set(count > 1)
    try:
        yield
    finally:
        _few.reset(token)


def install_linears(model: torch.nn.Module, *, int8: bool = False) -> None:
    """Let the model's linear layers compute few rows by the kernel; more, and all with autograd, go through torch.

    ``int8``: keep their weights as int8 with a scale an output, and forget those that they had.
    """
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = _Int8 if int8 else _FewRows
            if isinstance(module, _Int8):
                module.quantise()


class _FewRows(torch.nn.Linear):  # type: ignore[misc]
    """A linear layer that was a plain one; it has the same weights."""

    _of: tuple[int, Weights] | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        rows = input.numel() // self.in_features
        if rows > _MOST.get(weight.dtype, 0) or input.dtype != weight.dtype or not uses_kernels(weight.dtype):
            return super().forward(input)
        at = weight.data_ptr()
        if self._of is None or self._of[0] != at:
            if not weight.is_contiguous():
                return super().forward(input)
            self._of = at, Weights(numbers(weight.detach()), None, None if bias is None else bias.float().numpy())
        return _by_kernel(input, self._of[1])


class _Int8(torch.nn.Linear):  # type: ignore[misc]
    """A linear layer that was a plain one; its weights are codes now, and cannot be trained."""

    weight: torch.Tensor

    def quantise(self) -> None:
        """Replace the weights by codes."""
        weight = self.weight
        bias = None if self.bias is None else self.bias.detach().float().numpy()
        self._of = quantise_weights(weight.detach().float().numpy(), bias)
        self._scales = torch.from_numpy(self._of.scales).to(weight.dtype)
        # The model's code may look at its type. An embedding that shared these weights keeps them.
        self.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel() <= _MOST_CODES * self.in_features and input.dtype in _MOST:
            return _by_kernel(input, self._of)
        codes = torch.from_numpy(self._of.data).to(input.dtype)  # without loss in all types
        out = torch.nn.functional.linear(input, codes) * self._scales
        return out if self.bias is None else out + self.bias


def _by_kernel(input: torch.Tensor, weights: Weights) -> torch.Tensor:
    out = input.new_empty(*input.shape[:-1], len(weights.data))
    linear(numbers(input.contiguous()), weights, numbers(out), torch.get_num_threads())
    return out


def numbers(tensor: torch.Tensor) -> Any:
    """A tensor as kernels take it, over the same memory: float32, or the bits of a type of two bytes."""
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy()
