"""The CUDA kernels on this CPU: their text compiled with g++ against `native/cuda/shim`, a Launcher of numpy arrays."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ctxreuse.errors import ConfigError

__all__ = ["SANITIZE", "Shim", "build_shim"]

SANITIZE: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O0")
"""Compiler options for a shim that ends the process at the first access out of bounds and at undefined behaviour.

Not optimised: g++ takes ten times as long to optimise checks as it takes to run what the tests run.
"""

_OPTIONS: Final = (
    "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-DCTX_SHIM",
    "-shared", "-fPIC",
)  # fmt: skip


def build_shim(source: Path, folder: Path, *options: str) -> Path:
    """Compile the kernels of ``source`` (native/cuda) into a library in ``folder``; some seconds.

    ConfigError without a C++ compiler, or if it refuses the text.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise ConfigError("no C++ compiler is installed", fix="Install g++ or clang++")
    library = folder / "shim.so"
    command = [compiler, *_OPTIONS, *options, "-o", str(library), str(source / "shim" / "shim.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"the CUDA text does not compile with {compiler}: {done.stderr[-4000:]}")
    return library


class Shim:
    """A Launcher of ``library``, which build_shim made: kernels have run when ``launch`` returns. One thread at a time.

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

    def launch(self, name: str, grid: int, block: int, shared: int, arguments: Sequence[Any]) -> None:
        values = [np.uint64(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
        held = [ctypes.create_string_buffer(value.tobytes(), value.nbytes) for value in values]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(buffer) for buffer in held))
        if self._launch(name.encode(), grid, block, shared, places) != 0:
            raise LookupError(f"no kernel is called {name}")

    def size_of(self, name: str) -> int:
        """Bytes of a structure of the kernels; 0 for a name that is none."""
        return int(self._library.ctx_shim_size(name.encode()))
