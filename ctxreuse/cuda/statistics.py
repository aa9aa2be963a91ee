"""Sums over tokens and logits on a device, through numba.cuda: the figures of calibration and exit gates.

Kernels without warp intrinsics, so that numba's simulator runs the same code on a CPU (``NUMBA_ENABLE_CUDASIM=1``
before the first import). Arrays are anything with ``__cuda_array_interface__`` (cupy, torch), or numpy's, which are
copied to the device and back; results are numpy arrays. Without numba or a device the functions compute in numpy: the
same values but for the order of the sums.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["channel_mean", "exit_scores", "on_device", "token_rms"]

Floats = npt.NDArray[np.float32]

_SLAB: Final = 512  # tokens that one thread adds up for its channel


@cache
def on_device() -> bool:
    """Whether numba and a device (or the simulator) are there."""
    if find_spec("numba") is None or find_spec("numba_cuda") is None:
        return False
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        return True
    from numba import cuda

    return bool(cuda.is_available())


def channel_mean(x: Any) -> Floats:
    """Mean over tokens of x float32 [tokens, channels]: float32 [channels], summed in float64. tokens > 0."""
    tokens, channels = _shape(x, "x")
    if not tokens:
        raise ValueError("x: no token to take a mean of")
    if not on_device():
        return np.asarray(np.asarray(x, np.float32).mean(0, dtype=np.float64), np.float32)
    from ctxreuse.cuda import numba_kernels as kernels

    slabs = -(-tokens // _SLAB)
    partial = kernels.cuda.device_array((slabs, channels), np.float64)
    kernels.channel_sums[(-(-channels // kernels.THREADS), slabs), kernels.THREADS](
        kernels.cuda.to_device(x), partial, _SLAB
    )
    sums = partial.copy_to_host().sum(0)
    return np.asarray(sums / tokens, np.float32)


def token_rms(x: Any, mean: npt.ArrayLike) -> Floats:
    """Root mean square over channels of x - mean: float32 [tokens] of x float32 [tokens, channels]."""
    tokens, channels = _shape(x, "x")
    centre = np.ascontiguousarray(mean, np.float32)
    if centre.shape != (channels,) or not channels:
        raise ValueError(f"mean: needs float32 [{channels}], got {list(centre.shape)}")
    if not on_device():
        energy = np.square(np.asarray(x, np.float32) - centre).mean(1, dtype=np.float64)
        return np.asarray(np.sqrt(energy), np.float32)
    if not tokens:
        return np.zeros(0, np.float32)
    from ctxreuse.cuda import numba_kernels as kernels

    out = kernels.cuda.device_array(tokens, np.float32)
    kernels.token_energy[tokens, kernels.THREADS](kernels.cuda.to_device(x), kernels.cuda.to_device(centre), out)
    return np.asarray(np.sqrt(out.copy_to_host()), np.float32)


def exit_scores(logits: Any) -> Floats:
    """Largest logit, its lead over the second, and logsumexp of each row: float32 [rows, 3] of [rows, vocabulary].

    A gate leaves early where the lead, or exp(largest - logsumexp), is large. A vocabulary has two entries or more.
    """
    rows, words = _shape(logits, "logits")
    if words < 2:
        raise ValueError(f"logits: needs two words or more, got {words}")
    if not on_device():
        z = np.asarray(logits, np.float32)
        two = np.partition(z, words - 2, axis=1)[:, -2:]
        total = two[:, 1] + np.log(np.exp(z - two[:, 1:], dtype=np.float64).sum(1))
        return np.stack([two[:, 1], two[:, 1] - two[:, 0], total], 1).astype(np.float32)
    if not rows:
        return np.zeros((0, 3), np.float32)
    from ctxreuse.cuda import numba_kernels as kernels

    out = kernels.cuda.device_array((rows, 3), np.float32)
    kernels.row_scores[rows, kernels.THREADS](kernels.cuda.to_device(logits), out)
    return np.asarray(out.copy_to_host())


def _shape(x: Any, what: str) -> tuple[int, int]:
    if len(x.shape) != 2 or np.dtype(str(x.dtype).removeprefix("torch.")) != np.float32:
        raise ValueError(f"{what}: needs float32 with two axes, got {x.dtype} {list(x.shape)}")
    return int(x.shape[0]), int(x.shape[1])
