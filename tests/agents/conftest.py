"""Fixtures: a memory of text, a tiny real engine, and a memory with both."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory

from support.tiny_text import tiny_engine


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with Memory.open(tmp_path / "memory", embedder="none") as memory:
        yield memory
        memory.check()


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """Builds a tiny engine: see tiny_engine.py."""
    build: Callable[..., Any] = tiny_engine
    return build


@pytest.fixture(scope="session")
def engine(tiny: Callable[..., Any]) -> Any:
    return tiny()


@pytest.fixture
def asked(tmp_path: Path, engine: Any) -> Iterator[Memory]:
    """A memory with the tiny engine attached."""
    with Memory.open(tmp_path / "memory", engine) as memory:
        yield memory
        memory.check()


@pytest.fixture(scope="session")
def child_env() -> dict[str, str]:
    """The environment in which another interpreter finds what this one imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
