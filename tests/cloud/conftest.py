"""A tiny model in a folder, and the sidecar as a process."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for scripted.py and running.py

TINY = runpy.run_path(str(HERE.parent / "agents" / "tiny_engine.py"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with the tiny Llama, a tokenizer of bytes, and a template."""
    folder = tmp_path_factory.mktemp("tiny")
    TINY["tiny_model"]().save_pretrained(folder)
    TINY["tiny_text"]()._tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TINY["CHATML"])
    return folder


@pytest.fixture(scope="session")
def tiny_engine(tiny_folder: Path) -> Iterator[Any]:
    """An engine of this process over that folder: the same model space as every other's."""
    import torch

    from ctxreuse.engines import open_engine

    before = torch.get_num_threads()
    yield open_engine(str(tiny_folder), threads=1)
    torch.set_num_threads(before)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """sidecar(*flags) -> a running sidecar, see running.py; what a test leaves running is killed."""
    from running import Sidecar

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
