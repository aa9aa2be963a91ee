"""Waiting for what another thread or process does, with deadlines that a busy or slow machine does not miss."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Final, TypeVar

__all__ = ["PATIENCE", "async_until", "patient", "until"]

T = TypeVar("T")

#: Deadlines are this many times what an idle machine needs at most; a failure is seen later, nothing else changes.
PATIENCE: Final = float(os.environ.get("CTXREUSE_TEST_PATIENCE", "10"))


def patient(seconds: float) -> float:
    """Return a deadline for something that takes up to ``seconds`` on an idle machine."""
    return seconds * PATIENCE


def until(condition: Callable[[], T], seconds: float = 10.0, *, poll: float = 0.005) -> T:
    """Poll until ``condition()`` is true and return it; AssertionError after `patient` ``seconds``."""
    end = time.monotonic() + patient(seconds)
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {patient(seconds):.0f} s"
        time.sleep(poll)
    return found


async def async_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """As `until`, and the event loop goes on meanwhile."""
    async with asyncio.timeout(patient(seconds)):
        while not condition():
            await asyncio.sleep(0.005)
