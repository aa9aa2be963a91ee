"""How threads of a native library wait for each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["short_waits"]

#: What libgomp itself takes where it has more threads than cores.
_WAITS = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "1000"}


@contextmanager
def short_waits() -> Iterator[None]:
    """Libraries loaded inside have threads that spin shortly while they wait for each other, unless the user chose.

    libgomp's default, 300,000 rounds, keeps a core from the thread that is waited for. llama.cpp beside other programs
    (load 9 on two cores): a token took 0.9 to 1.1 s with it, .08 to .11 with 1,000 rounds; on two cores of their own
    both took 13 ms, and threads that sleep at once 28. torch beside the project's kernels, on two cores: 128 tokens in
    bfloat16 took 670 ms with it, 445 with 1,000; in float32 a token took as long with half of the processor time.
    libgomp comes down to 100 rounds, near to sleeping at once, as soon as two threads of a process compute (a token of
    1,200 of llama.cpp: 36.5 ms); where waiting is ``active``, to 1,000 (18.5).
    """
    chosen = any(name in os.environ for name in _WAITS)
    if not chosen:
        os.environ.update(_WAITS)
    try:
        yield
    finally:
        if not chosen:  # other libraries, and child processes, have their own reasons
            for name in _WAITS:
                del os.environ[name]
