"""Processes of their own for what one process cannot show: owners, deaths, mounts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start ``python -c code args`` (after the words of ``prefix``) with pipes; what runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *args: object, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        words = [*prefix, sys.executable, "-c", code, *map(str, args)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def mounts() -> Callable[[str], tuple[str, ...]]:
    """Words that run a command after shell text in a mount namespace of its own; skips where the kernel forbids it."""
    unshare = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-Urm")
    try:
        able = subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("this system lets nobody mount, not even in a namespace")
    return lambda text: (*unshare, "sh", "-ec", f'{text}; exec "$@"', "sh")


@pytest.fixture
def data_size() -> Callable[[Path], int]:
    """Size of an environment's data file."""
    return lambda home: (home / "data.mdb").stat().st_size
