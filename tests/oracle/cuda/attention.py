"""One token's attention over int8 rows in its plainest form, through numba.cuda: what tuned kernels are held against.

Written for reading, not for speed. Without numba or a device `ctxreuse.kernels.attention` computes the same on the CPU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxreuse.cuda.statistics import on_device
from ctxreuse.kernels.attention import Attended, Part, Plane, attend, merge

__all__ = ["decode_int8"]


def decode_int8(q: npt.NDArray[np.float32], k: Plane, v: Plane, *, scale: float) -> Attended:
    """o [Hq, 1, D] and lse [Hq, 1] of q float32 [Hq, 1, D] over all rows of two int8 planes on the host.

    ValueError for other formats and shapes.
    """
    if k.format != "int8" or v.format != "int8" or k.scales is None or v.scales is None:
        raise ValueError(f"planes: need int8, got {k.format} and {v.format}")
    heads, rows, dim = k.data.shape
    if v.data.shape != k.data.shape or q.ndim != 3 or q.shape[1:] != (1, dim) or not heads or q.shape[0] % heads:
        raise ValueError(f"q {q.shape}, k {k.data.shape} and v {v.data.shape} do not fit")
    if not on_device() or not rows:
        return attend(q, [Part(k, v)], scale=scale)
    from oracle.cuda import numba_attention as kernels

    shares = -(-rows // kernels.ROWS)
    o = kernels.cuda.device_array((shares, q.shape[0], dim), np.float32)
    lse = kernels.cuda.device_array((shares, q.shape[0]), np.float32)
    arrays = (q[:, 0], k.data, k.scales, v.data, v.scales)
    given = [kernels.cuda.to_device(np.ascontiguousarray(array)) for array in arrays]
    kernels.attend_share[(q.shape[0], shares), kernels.THREADS](*given, scale, o, lse)
    parts = zip(o.copy_to_host(), lse.copy_to_host(), strict=True)
    return merge([Attended(part[:, None], ends[:, None]) for part, ends in parts])
