"""Threads of a daemon share arenas of the C library: with one each, nobody else uses what is free there."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, sys, threading
from ctxreuse import _native

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
if int(sys.argv[1]):
    _native.limit_arenas(int(sys.argv[1]))
all_here = threading.Barrier(12)

def allocate():
    all_here.wait()
    libc.malloc(1000)
    all_here.wait()

threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fdopen.restype, libc.fdopen.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_char_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_threads_share_arenas_once_told_to() -> None:
    def arenas(most: int) -> int:
        done = subprocess.run([sys.executable, "-c", _PROGRAM, str(most)], capture_output=True, check=True, text=True)
        return len(re.findall("<heap nr=", done.stdout))

    assert arenas(2) <= 2 < arenas(0)


def test_no_arenas_at_all_are_refused() -> None:
    from ctxreuse import _native

    with pytest.raises(ValueError, match="1 to 1024"):
        _native.limit_arenas(0)


@pytest.mark.parametrize("nbytes", [0, 65535, (32 << 20) + 1])
def test_a_size_that_cannot_be_mapped_from_is_refused(nbytes: int) -> None:
    from ctxreuse import _native

    with pytest.raises(ValueError, match="65536 to 33554432"):
        _native.map_from(nbytes)


@pytest.mark.parametrize("nbytes", [-1, (1 << 30) + 1])
def test_a_size_that_cannot_be_kept_is_refused(nbytes: int) -> None:
    from ctxreuse import _native

    with pytest.raises(ValueError, match="0 to 1073741824"):
        _native.keep_freed(nbytes)


_FREED = """
import resource, sys
import numpy as np
from ctxreuse import _native

if int(sys.argv[1]):
    _native.keep_freed(int(sys.argv[1]))

def faults():
    held = [np.ones(1 << 20) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

first = faults()
for _ in range(10):
    last = faults()
print(last - first)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="thresholds are glibc's")
def test_freed_memory_is_kept_once_told_to() -> None:
    def new_pages(kept: int) -> int:
        done = subprocess.run([sys.executable, "-c", _FREED, str(kept)], capture_output=True, check=True, text=True)
        return int(done.stdout)

    assert new_pages(1 << 28) < new_pages(0) / 10


_HELD = """
import ctypes
from ctxreuse.metrics import Metrics

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
metrics = Metrics()

def show():
    metrics.render()
    print(*(int(metrics.read("ctxreuse_heap_bytes", state)) for state in ("used", "kept")))

show()
pieces = [libc.malloc(60_000) for _ in range(1000)]
show()
for piece in pieces[::2]:
    libc.free(piece)
show()
libc.malloc(64 << 20)  # a mapping of its own
show()
objects = [object() for _ in range(100_000)]
before = metrics.read("ctxreuse_python_blocks")
metrics.render()
print(int(metrics.read("ctxreuse_python_blocks") - before), 0)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not say")
def test_metrics_tell_used_memory_from_freed_memory_that_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, check=True, text=True)
    start, full, half, mapped, python = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    allowed = 2 * 10**6
    assert abs(full[0] - start[0] - 60 * 10**6) < allowed
    assert abs(half[0] - full[0] + 30 * 10**6) < allowed
    assert abs(half[1] - full[1] - 30 * 10**6) < allowed
    assert abs(mapped[0] - half[0] - (64 << 20)) < allowed
    assert python[0] >= 100_000
