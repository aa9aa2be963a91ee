"""Angles of rotary position embedding, computed in float64 so that far positions lose no precision."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["inverse_frequencies", "shift_tables"]


def inverse_frequencies(theta: float, rotary_dim: int) -> NDArray[np.float64]:
    """theta^(-2i/r) for i < r/2, shape (r/2,) (RoFormer, arXiv 2104.09864, section 3.2.2).

    For plain RoPE only: models with scaled frequencies (llama3, yarn, linear) must hand over their own `inv_freq`.
    ValueError unless theta > 0 and rotary_dim is even and positive.
    """
    if not theta > 0 or rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary embedding needs theta > 0 and an even positive width, got {theta} and {rotary_dim}")
    return np.asarray(theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim))


def shift_tables(inv_freq: ArrayLike, delta: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(cos, sin) float32, shape (r/2,), that move a rotated key by `delta` positions (negative: backwards).

    Rotations compose: R(p + delta) = R(delta) R(p), so neither the old nor the new position matters, and an
    attention scaling already in the key (yarn) stays in it. The product inv_freq * delta is taken in float64: in
    float32 an angle of 10^5 rad is off by up to 0.004 rad. ValueError for a shape that is not (n,) or values that
    are not finite.
    """
    frequencies = np.asarray(inv_freq, dtype=np.float64)
    if frequencies.ndim != 1 or not np.isfinite(frequencies).all():
        raise ValueError(f"inv_freq must be one finite row, got shape {frequencies.shape}")
    angles = frequencies * delta
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
