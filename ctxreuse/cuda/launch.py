"""The CUDA kernels: their source files, their compilation for the current device, and their launch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import ConfigError

__all__ = ["FILES", "INSTALL", "Launcher", "missing", "open_device", "text_folder"]

FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "attend.cu": (
        "ctx_attend_64",
        "ctx_attend_128",
        "ctx_attend_256",
        "ctx_attend_64_wide",
        "ctx_attend_128_wide",
        "ctx_attend_merge",
    ),
    "klt_decode.cu": ("ctx_klt_decode",),
    "klt_encode.cu": ("ctx_klt_quantise", "ctx_klt_code", "ctx_klt_pack"),
}
"""The files that are compiled, and the kernels of each."""

_OPTIONS: Final = ("-std=c++17",)  # no fast math: products and sums round as the CPU's do
INSTALL: Final = "pip install 'ctxreuse[cuda]' on a machine with an NVIDIA GPU and its driver"


class Launcher(Protocol):
    """A device as the wrappers see it.

    ``xp`` is the array module of its memory (cupy; numpy where the kernels run on the CPU in tests). Arrays of it and
    numpy scalars are what ``launch`` takes. Work is queued on the current stream: arguments must live until it is done.
    """

    @property
    def xp(self) -> Any: ...

    @property
    def name(self) -> str:
        """What the device is called."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one block may have."""

    @property
    def multiprocessors(self) -> int:
        """How many the device has."""

    def host(self, size: int) -> npt.NDArray[np.uint8]:
        """Bytes of the host's memory that the device copies from and to at full speed. Uninitialised."""

    def wait(self) -> None:
        """Return when all that is queued on the current stream is done."""

    def launch(self, name: str, grid: int, block: int, shared: int, arguments: Sequence[Any]) -> None:
        """Queue ``grid`` blocks of ``block`` threads with ``shared`` bytes of shared memory each. 0 blocks: nothing."""


def text_folder() -> Path:
    """The folder of the kernels' text, as installed. ConfigError where the build left it out."""
    for base in sys.modules["ctxreuse"].__path__:
        folder = Path(base) / "cuda" / "text"
        if folder.is_dir():
            return folder
    raise ConfigError("the CUDA kernels' text is not installed", fix="Reinstall ctxreuse from a wheel or with CMake")


def missing() -> str:
    """Why no device can be used, in a few words; empty if one can. Imports cupy where it is installed."""
    if find_spec("cupy") is None:
        return "cupy is not installed"
    import cupy

    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA driver answers ({error})"
    return "" if count else "no CUDA device"


@cache
def open_device() -> Launcher:
    """The current CUDA device; its kernels are compiled at first use, file by file, and kept by CuPy on disk.

    ConfigError without cupy, driver or device.
    """
    why = missing()
    if why:
        raise ConfigError(f"CUDA kernels cannot run: {why}", fix=INSTALL)
    return _Cupy()


class _Cupy:
    def __init__(self) -> None:
        import cupy

        folder = text_folder()
        options = (*_OPTIONS, f"-I{folder}")
        self.xp: Any = cupy
        device = cupy.cuda.Device()
        attributes = device.attributes
        self.name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        self.shared_bytes = int(attributes["MaxSharedMemoryPerBlockOptin"])
        self.multiprocessors = int(attributes["MultiProcessorCount"])
        self._modules = {
            name: cupy.RawModule(code=(folder / name).read_text("utf-8"), options=options, backend="nvrtc")
            for name in FILES
        }
        self._kernels: dict[str, Any] = {}

    def host(self, size: int) -> npt.NDArray[np.uint8]:
        import cupyx

        return cast("npt.NDArray[np.uint8]", cupyx.empty_pinned(size, np.uint8))

    def wait(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def launch(self, name: str, grid: int, block: int, shared: int, arguments: Sequence[Any]) -> None:
        kernel = self._kernels.get(name)
        if kernel is None:
            file = next(file for file, names in FILES.items() if name in names)
            kernel = self._modules[file].get_function(name)
            kernel.max_dynamic_shared_size_bytes = self.shared_bytes
            self._kernels[name] = kernel
        if grid:
            kernel((grid,), (block,), tuple(arguments), shared_mem=shared)
