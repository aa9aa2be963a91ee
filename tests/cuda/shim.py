"""The CUDA kernels' text compiled with g++ and run on this CPU: a Launcher whose memory is numpy's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

NATIVE = Path(__file__).resolve().parents[2] / "native" / "cuda"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


def build(folder: Path, *options: str) -> Path:
    """Compile the shim with all kernels into a library in ``folder``."""
    compiler = shutil.which("g++") or shutil.which("clang++") or "c++"
    library = folder / "shim.so"
    subprocess.run(
        [
            compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-DCTX_SHIM", "-shared",
            "-fPIC", *options, "-o", library, NATIVE / "shim" / "shim.cpp",
        ],
        check=True,
    )  # fmt: skip
    return library


class Shim:
    """A Launcher: arrays are numpy's, kernels run to their end before ``launch`` returns."""

    xp: Any = np
    shared_bytes = 227 * 1024

    def __init__(self, library: Path) -> None:
        self._launch = ctypes.CDLL(str(library)).ctx_shim_launch
        self._launch.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]
        self.launched: list[str] = []

    def launch(self, name: str, grid: int, block: int, shared: int, arguments: Sequence[Any]) -> None:
        values = [np.uint64(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
        held = [ctypes.create_string_buffer(value.tobytes(), value.nbytes) for value in values]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(buffer) for buffer in held))
        if self._launch(name.encode(), grid, block, shared, places) != 0:
            raise LookupError(f"no kernel is called {name}")
        self.launched.append(name)
