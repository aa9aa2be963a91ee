"""Adapters on the frameworks that they are for, in an environment that has those: `make test-adapters`."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ctxreuse_agents import Memory

# mem0 reads these when it is imported: nothing is sent anywhere, and its own folder is none of a user's.
os.environ |= {"MEM0_TELEMETRY": "False", "MEM0_DIR": tempfile.mkdtemp(prefix="ctxreuse-mem0-")}

#: The frameworks are in .venv-adapters alone.
collect_ignore_glob = [] if importlib.util.find_spec("langgraph") else ["test_*.py"]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with Memory.open(tmp_path / "memory") as memory:
        yield memory
        memory.check()
        assert memory.ledger.verify().problems == ()


@pytest.fixture(scope="session")
def smollm2_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Memory]:
    """A memory with a real model: `ctxreuse model get smollm2`, or another name or folder in ADAPTERS_MODEL."""
    model = os.environ.get("ADAPTERS_MODEL") or "smollm2"
    with Memory.open(tmp_path_factory.mktemp("smollm2"), model) as memory:
        yield memory
