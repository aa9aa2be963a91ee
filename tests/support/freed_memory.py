"""Memory that is free in the C library and that only trimming gives back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["freed_memory"]

_SIZE, _COUNT = 60_000, 3000


@contextmanager
def freed_memory() -> Iterator[Callable[[], int]]:
    """Free each second of many allocations: the others keep the C library from giving these back.

    Yields how many bytes of the 90 MB were given back since.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    allocated = [libc.malloc(_SIZE) for _ in range(_COUNT)]
    for one in allocated:
        ctypes.memset(one, 1, _SIZE)
    before = _resident()
    for one in allocated[::2]:
        libc.free(one)
    yield lambda: before - _resident()
    for one in allocated[1::2]:
        libc.free(one)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
