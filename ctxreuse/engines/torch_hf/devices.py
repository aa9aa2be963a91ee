"""Where a model computes: in the host's memory, or in a device's, with copies and kernels between the two."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ctxreuse.cuda import Launcher, missing, open_device
from ctxreuse.cuda.profile import DeviceProfiles
from ctxreuse.errors import ConfigError, EngineError

__all__ = ["HOST", "TorchDevice", "device_errors", "device_of", "kernel_stream"]


class TorchDevice:
    """The memory in which weights, K and V of one model lie. Any thread may use it.

    Attributes:
        device: torch's device.
        apart: numpy cannot see that memory; what goes in or out is copied through the host's.
        launcher: runs the project's CUDA kernels there; None: blocks are decoded on the host, and then copied.
    """

    def __init__(self, device: torch.device, *, apart: bool, launcher: Launcher | None = None) -> None:
        self.device, self.apart, self.launcher = device, apart, launcher
        #: Of codecs, as the kernels need them.
        self.profiles = None if launcher is None else DeviceProfiles(launcher)
        self._streams = threading.local()

    @classmethod
    def of(cls, device: torch.device) -> TorchDevice:
        """The memory of a device of torch; its kernels where CuPy is installed."""
        if device.type == "cpu":
            return HOST
        first = device.type == "cuda" and device.index in (None, 0)  # the one that CuPy compiles the kernels for
        launcher = open_device() if first and not missing() else None
        return cls(device, apart=True, launcher=launcher)

    @property
    def pinned(self) -> bool:
        """True if copies are faster from memory that the system cannot move."""
        return bool(self.device.type == "cuda")

    def free_memory(self) -> int | None:
        """Bytes that could be allocated there; None: in the host's memory, or unknown."""
        if self.device.type != "cuda":
            return None
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0] + kept)

    def staging(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory for ``count`` numbers on their way; torch keeps and reuses it."""
        return torch.empty(count, dtype=dtype, pin_memory=self.pinned)

    def array(self, tensor: torch.Tensor) -> Any:
        """A tensor of the device as the kernels' array module takes it, over the same memory."""
        assert self.launcher is not None
        return tensor.numpy() if tensor.is_cpu else self.launcher.xp.from_dlpack(tensor)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies and kernels of this thread inside run beside the model's; they are done when the block ends."""
        if self.device.type != "cuda":
            yield
            return
        stream = getattr(self._streams, "own", None)
        if stream is None:
            stream = self._streams.own = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream), kernel_stream(self.device, self.launcher):
            try:
                yield
            finally:
                stream.synchronize()


#: What torch raises once a device does not answer any more; versions before 2.8 have no name for it.
_LOST = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)

HOST = TorchDevice(torch.device("cpu"), apart=False)
"""The host's memory."""


class _Stream:
    """A stream of torch as CuPy takes it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """The version of the protocol, and the stream."""
        return 0, self._handle


@contextmanager
def kernel_stream(device: torch.device, launcher: Launcher | None) -> Iterator[None]:
    """The project's kernels inside are queued where torch's are, on this thread."""
    if launcher is None or device.type != "cuda":
        yield
        return
    with launcher.xp.cuda.Stream.from_external(_Stream(torch.cuda.current_stream(device).cuda_stream)):
        yield


def device_of(name: str) -> torch.device:
    """The device that a setting names. Raises ConfigError if torch has none of that name here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"torch cannot compute on {name!r}: {reason}",
            where="engine.device",
            fix="Use cpu; cuda needs an NVIDIA GPU, its driver, and a torch that is built with CUDA",
        ) from error
    return device


def _first_line(error: BaseException) -> str:
    """What torch says of an error, without its full stop: `EngineError` puts one."""
    return str(error).split("\n", 1)[0].removesuffix(".")


@contextmanager
def device_errors(place: TorchDevice) -> Iterator[None]:
    """Device memory that runs out inside is an EngineError, and a device that is lost says so."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:  # torch's, or CuPy's
        torch.cuda.empty_cache()
        raise EngineError(
            f"no memory left on {place.device}: {_first_line(error)}",
            fix="Wait for other contexts, shorten this one, or lower context_cache_bytes",
        ) from error
    except _LOST as error:
        raise EngineError(f"{place.device} failed: {_first_line(error)}", fix="Start again") from error
