"""Scores of logits on a device, through numba.cuda: what an exit's gate looks at.

A kernel without warp intrinsics, so that numba's simulator runs the same code on a CPU (``NUMBA_ENABLE_CUDASIM=1``
before the first import). Arrays are anything with ``__cuda_array_interface__`` (cupy, torch), or numpy's, which are
copied to the device and back; results are numpy arrays. Without numba or a device the functions compute in numpy: the
same values but for the order of the sums.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["exit_scores", "on_device"]

Floats = npt.NDArray[np.float32]


@cache
def on_device() -> bool:
    """Whether numba and a device (or the simulator) are there."""
    if find_spec("numba") is None or find_spec("numba_cuda") is None:
        return False
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        return True
    from numba import cuda

    return bool(cuda.is_available())


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
