"""Copies between the host's memory and a device's, for any Launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.cuda.launch import Launcher

__all__ = ["on_host", "to_device", "to_host"]


def on_host(array: Any) -> npt.NDArray[Any]:
    """A copy in the host's memory, waiting for what is queued."""
    return np.asarray(array if isinstance(array, np.ndarray) else array.get())


def to_host(launcher: Launcher, array: Any) -> npt.NDArray[Any]:
    """As `on_host`, into memory that the device writes at full speed, for what is large."""
    out: npt.NDArray[Any] = launcher.host(array.nbytes).view(array.dtype).reshape(array.shape)
    if isinstance(array, np.ndarray):
        out[...] = array
    else:
        array.get(out=out)
    return out


def to_device(launcher: Launcher, arrays: Sequence[npt.NDArray[Any]], kept: list[Any]) -> Any:
    """The bytes of arrays one after the other, uint8 in the device's memory.

    The copy is queued: ``kept`` gets what must live until it is done.
    """
    parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    staged = launcher.host(sum(part.size for part in parts))
    np.concatenate(parts, out=staged)
    out = launcher.xp.empty(staged.size, np.uint8)
    kept += [staged, out]
    if isinstance(out, np.ndarray):
        out[...] = staged
    else:
        out.set(staged)
    return out
