"""Linear layers by the project's own kernel: a decode step reads the weights once, where they lie.

torch packs the weights of a matrix product in each call. All linear layers of SmolLM2, one thread of a Xeon with AMX,
ms of processor time (torch / this, as it was when it computed four rows at a time):

  rows                    1          4          8         16         32
  float32         43.1/45.8  78.3/49.5   107/57.6   110/80.7    136/118
  bfloat16        44.3/26.3  49.5/30.7  49.7/53.0  49.2/77.8   49.0/114

In float32 a context that computes alone has the bits of plain transformers, so torch computes it; its product of one
row reads no slower. Kernels compute passes over several contexts, contexts with rows in place, and all of bfloat16.

A processor that does not multiply bfloat16 converts it, which torch does in 3 to 5 times what float32 takes: there the
kernel computes all rows, from weights that it decodes once for some rows. With AVX512-BF16 and without AMX it computes
all as well, as its products are the processor's too and nothing is packed. All of SmolLM2 with it and the other kernels
of `decoder`, one thread, ms of processor time; weights of bfloat16 that became float32 for torch, 4 MB at a time,
against the kernel (with AVX-512 as it was when it packed eight rows together, not twelve):

  rows                               8         16         48        128        256        512
  Xeon with AVX-512 alone       117/41     134/67    185/121    346/280    599/568
  EPYC with AVX2, 1,024 before                              930/690             3,160/2,700
  EPYC with AVX512-BF16, 1,024
  before; torch's own products   31/21      41/26      64/50    132/116    238/220      457/440
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Final

import torch

from ctxreuse.cpu import cpu_features, cpu_name, multiplies_bfloat16
from ctxreuse.engines.torch_hf.bits import numbers
from ctxreuse.engines.torch_hf.modes import computes_by_kernels
from ctxreuse.engines.torch_hf.packed import is_packing
from ctxreuse.kernels.dispatch import active
from ctxreuse.kernels.linear import Weights, linear, quantise_weights

__all__ = ["FewRows", "computes_all", "install_linears", "most_rows", "uses_kernels"]

#: Most rows of a call to the kernel, by the type of weights, where torch multiplies what they are.
#: In the first table 8 rows of bfloat16 are about even; since, the kernel does 5 to 8 at once, and what surrounds them.
_MOST: Final = {torch.float32: 48, torch.bfloat16: 8}
#: The same for rows of bfloat16 where weights are int8, which become bfloat16 for torch.
_MOST_CODES: Final = 24
#: Where torch would have to convert.
_ALL: Final = sys.maxsize


@cache
def _has_products() -> bool:
    """True if torch multiplies bfloat16 by instructions of the processor that the kernels do not use.

    Where there are none, torch takes 3 to 5 times as long as in float32; those of AVX-512 the kernels use as well.
    """
    features = cpu_features()
    kernels = "avx512_bf16" in features and "amx_bf16" not in features and active() == "avx512"
    return multiplies_bfloat16() and not kernels


@cache
def _uses_all_lanes() -> bool:
    """False if torch multiplies float32 with half of the processor's lanes: its library (MKL) does on those of AMD with
    AVX-512, where 48 rows and more of one thread are 113 GFLOP/s by it and 150 to 199 by the kernels."""
    return not (active() == "avx512" and cpu_name().startswith("AMD"))


def uses_kernels(dtype: torch.dtype) -> bool:
    """True if few tokens of this type are computed by the project's kernels now, on this thread."""
    return (dtype != torch.float32 or is_packing() or computes_by_kernels()) and not torch.is_grad_enabled()


def install_linears(model: torch.nn.Module, *, int8: bool = False) -> None:
    """Let the model's linear layers compute few rows by the kernel; more, and all with autograd, go through torch.

    ``int8``: keep their weights as int8 with a scale an output, and forget those that they had.
    """
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = _Int8 if int8 else FewRows
            if isinstance(module, _Int8):
                module.quantise()


class FewRows(torch.nn.Linear):  # type: ignore[misc]
    """A linear layer that was a plain one; it has the same weights."""

    _of: tuple[int, Weights] | None = None

    def place(self) -> int:
        """Where the weights are: others have another."""
        return int(self._parameters["weight"].data_ptr())  # twice as fast as by attribute

    def weights(self) -> Weights:
        """They as the kernels take them; ValueError if they are not contiguous."""
        at = self.place()
        if self._of is None or self._of[0] != at:
            weight, bias = self.weight.detach(), self.bias
            if not weight.is_contiguous():
                raise ValueError("weights: not contiguous")
            self._of = at, Weights(numbers(weight), None, None if bias is None else bias.detach().float().numpy())
        return self._of[1]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if input.dtype != weight.dtype or not uses_kernels(weight.dtype) or not weight.is_contiguous():
            return super().forward(input)
        if input.numel() <= most_rows(self) * self.in_features:
            return _by_kernel(input, self.weights())
        return super().forward(input)


class _Int8(torch.nn.Linear):  # type: ignore[misc]
    """A linear layer that was a plain one; its weights are codes now, and cannot be trained."""

    weight: torch.Tensor

    def quantise(self) -> None:
        """Replace the weights by codes."""
        weight = self.weight
        bias = None if self.bias is None else self.bias.detach().float().numpy()
        self._of = quantise_weights(weight.detach().float().numpy(), bias)
        self._scales = torch.from_numpy(self._of.scales)
        # The model's code may look at its type. An embedding that shared these weights keeps them.
        self.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    def place(self) -> int:
        """See `FewRows.place`; these stay where they are."""
        return 0

    def weights(self) -> Weights:
        """See `FewRows.weights`."""
        return self._of

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        few = input.numel() <= most_rows(self) * self.in_features and input.dtype in _MOST
        if few and not torch.is_grad_enabled():
            return _by_kernel(input, self._of)
        # Whole numbers lose nothing in bfloat16; of float16 their sums would overflow.
        wide = input if input.dtype == torch.bfloat16 else input.float()
        codes = torch.from_numpy(self._of.data).to(wide.dtype)
        out = (torch.nn.functional.linear(wide, codes) * self._scales.to(wide.dtype)).to(input.dtype)
        return out if self.bias is None else out + self.bias


def most_rows(layer: torch.nn.Linear) -> int:
    """Most rows that the kernel computes: torch is faster for more."""
    dtype, codes = layer.weight.dtype, isinstance(layer, _Int8)
    if computes_all(dtype) or (codes and dtype == torch.float32):
        return _ALL
    return _MOST_CODES if codes else _MOST.get(dtype, 0)


def computes_all(dtype: torch.dtype) -> bool:
    """True if the kernel, where it is used, multiplies any number of rows by weights of this type."""
    if dtype == torch.float32:
        return not _uses_all_lanes()
    return dtype == torch.bfloat16 and not _has_products()


def _by_kernel(input: torch.Tensor, weights: Weights) -> torch.Tensor:
    out = input.new_empty(*input.shape[:-1], len(weights.data))
    linear(numbers(input.contiguous()), weights, numbers(out), torch.get_num_threads())
    return out
