"""A tiny model in a folder, and the sidecar as a process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.tiny_text import save_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with the tiny Llama, a tokenizer of bytes, and a template."""
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_engine(tiny_folder: Path) -> Any:
    """An engine of this process over that folder: the same model space as every other's."""
    from ctxreuse.engines import open_engine

    return open_engine(str(tiny_folder))


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """sidecar(*flags) -> a running sidecar, see `support.sidecar`; what a test leaves running is killed."""
    from support.sidecar import Sidecar

    started: list[Sidecar] = []

    def start(*flags: str, **env: str) -> Sidecar:
        started.append(Sidecar(tmp_path, flags, env))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    """Engine processes must end with their node."""
    yield
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    left = [line for line in listed.stdout.splitlines() if "ctxreuse_cloud" in line and "defunct" not in line]
    for line in left:
        os.kill(int(line.split()[0]), signal.SIGKILL)
    assert not [line for line in left if "ctxreuse_cloud serve" in line]
