"""One pool of threads, one a core, that native calls over many streams are spread over; it is made when first used."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["cores", "spread"]

T = TypeVar("T")

_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(call: Callable[[int], T], parts: int) -> list[T]:
    """call(0) to call(parts - 1), at once where there is more than one; results in order, the first error raised.

    Calls must release the interpreter lock to run side by side, and must not themselves spread.
    """
    if parts == 1:
        return [call(0)]
    return list(_threads().map(call, range(parts)))


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(cores(), thread_name_prefix="ctxreuse-kernels")
        return _pool


def _forget_threads() -> None:
    """A forked child has none of its parent's threads, and maybe a lock that one of them had taken."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
