"""What surrounds the attention of a decoder layer, for the few rows of a decode step, in two calls.

Pre-norm layers with rotary positions and a gated MLP, as Llama, Mistral, Qwen and Gemma 3 have them: norms, linear
layers, rotation, gate and residuals. Numbers in between are float32, linear layers those of `ctxreuse.kernels.linear`,
whose words on threads hold here as well. A row has the same bits alone and among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxreuse.kernels.dispatch import native
from ctxreuse.kernels.linear import ACTIVATIONS, FORMATS, Weights

__all__ = ["GATES", "DecoderLayer", "Norms"]

#: Functions that an MLP's gate goes through, as the kernels number them: x sigmoid(x), and GELU by tanh.
GATES: Final = {"silu": 0, "gelu_tanh": 1}


class Norms(NamedTuple):
    """Weights float32 of RMS norms: [hidden], of q and k [dim]; None: there is none."""

    enter: NDArray[np.float32]
    q: NDArray[np.float32] | None
    k: NDArray[np.float32] | None
    attended: NDArray[np.float32] | None
    mlp: NDArray[np.float32]
    leave: NDArray[np.float32] | None


class DecoderLayer:
    """One layer. It holds the memory of its weights, and sees what is written there."""

    def __init__(
        self, parts: Sequence[Weights], norms: Norms, *, eps: float, heads: int, kv_heads: int, dim: int, gate: str
    ) -> None:
        """``parts``: the weights of q, k, v, o, gate, up, down. ValueError if they are not those of one layer."""
        given = []
        for one in parts:
            if one.data.dtype not in FORMATS:
                raise ValueError(f"decoder layer: weights of {one.data.dtype}")
            given.append((one.data, FORMATS[one.data.dtype], one.scales, one.bias, *one.data.shape))
        self._layer = native.decoder_layer(given, norms, eps, heads, kv_heads, dim, GATES[gate])

    def enter(
        self, x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any], qkv: NDArray[Any], rows: int, threads: int = 1
    ) -> None:
        """Write q, k and v, rotated, of x [rows, hidden] to ``qkv``, one after the other, each [rows, its heads, dim].

        cos and sin [rows, dim] are those of the rows' positions. All are float32, or bits of bfloat16, and contiguous;
        else ValueError, as of sizes that do not fit.
        """
        native.layer_enter(self._layer, x, cos, sin, qkv, ACTIVATIONS[x.dtype], rows, threads)

    def leave(self, attended: NDArray[Any], x: NDArray[Any], y: NDArray[Any], rows: int, threads: int = 1) -> None:
        """Write what the layer makes of x [rows, hidden] and its attention [rows, heads, dim] to y, which may be x."""
        native.layer_leave(self._layer, attended, x, y, ACTIVATIONS[x.dtype], rows, threads)
