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
