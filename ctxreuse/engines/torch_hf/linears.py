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

from typing import Any, Final

import torch

from ctxreuse.engines.torch_hf.packed import is_packing
from ctxreuse.kernels.linear import Weights, linear

__all__ = ["install_linears", "numbers", "uses_kernels"]

#: Most rows of a call to the kernel, by the type of weights.
_MOST: Final = {torch.float32: 48, torch.bfloat16: 6}


def uses_kernels(dtype: torch.dtype) -> bool:
    """True if few tokens of this type are computed by the project's kernels now, on this thread."""
    return (dtype != torch.float32 or is_packing()) and not torch.is_grad_enabled()


def install_linears(model: torch.nn.Module) -> None:
    """Let the model's linear layers compute few rows by the kernel; more, and all with autograd, go through torch."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = _FewRows


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
        out = input.new_empty(*input.shape[:-1], self.out_features)
        linear(numbers(input.contiguous()), self._of[1], numbers(out), torch.get_num_threads())
        return out


def numbers(tensor: torch.Tensor) -> Any:
    """A tensor as kernels take it, over the same memory: float32, or the bits of a type of two bytes."""
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy()
