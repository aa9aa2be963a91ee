"""The CUDA kernels on this CPU: a Launcher of numpy arrays over what `native_builds.shim` compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Shim"]


class Shim:
    """A Launcher of ``library``: kernels have run when ``launch`` returns. One thread at a time.

    A kernel whose threads wait for each other in vain ends the process with a message.
    """

    xp: Any = np
    name = "shim"
    shared_bytes = 227 * 1024
    multiprocessors = 4

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._launch = self._library.ctx_shim_launch
        self._launch.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]
        self._library.ctx_shim_size.restype = ctypes.c_size_t

    def host(self, size: int) -> np.ndarray:
        return np.full(size, 0xA5, np.uint8)

    def wait(self) -> None:
        """Kernels have run when `launch` returns."""

    def launch(self, name: str, grid: int, block: int, shared: int, arguments: Sequence[Any]) -> None:
        values = [np.uint64(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
        held = [ctypes.create_string_buffer(value.tobytes(), value.nbytes) for value in values]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(buffer) for buffer in held))
        if self._launch(name.encode(), grid, block, shared, places) != 0:
            raise LookupError(f"no kernel is called {name}")

    def size_of(self, name: str) -> int:
        """Bytes of a structure of the kernels; 0 for a name that is none."""
        return int(self._library.ctx_shim_size(name.encode()))
