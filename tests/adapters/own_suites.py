"""Plugin of pytest for the tests that frameworks ship: their own classes are replaced by the adapters."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory
from ctxreuse_agents.adapters import LangGraphSaver, LangGraphStore, OpenAISession

_opened: dict[str, Memory] = {}
_used: list[str] = []


def _memory(key: str) -> Memory:
    """One memory for what has the same file in the suite."""
    if key not in _opened:
        _opened[key] = Memory.open(Path(tempfile.mkdtemp(prefix="ctxreuse-suite-")) / "memory")
    return _opened[key]


class SuiteSession(OpenAISession):
    """With the arguments of the SDK's SQLite session, and its ``close``."""

    def __init__(self, session_id: str, db_path: Any = ":memory:", **options: Any) -> None:
        key = str(db_path) if db_path != ":memory:" else f"memory {len(_opened)}"
        super().__init__(_memory(key), session_id, **options)

    def close(self) -> None:
        """The memory is closed at the test's end."""


class SuiteStore(LangGraphStore):
    """In a memory of its own."""

    def __init__(self) -> None:
        super().__init__(_memory(f"memory {len(_opened)}"))


class SuiteSaver(LangGraphSaver):
    """In a memory of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(_memory(f"memory {len(_opened)}"), **options)


_ADAPTERS = {"SQLiteSession": SuiteSession, "InMemoryStore": SuiteStore, "InMemorySaver": SuiteSaver}


@pytest.fixture(autouse=True)
def adapters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the suite's module the adapters, and close what was opened."""
    for name, adapter in _ADAPTERS.items():
        if hasattr(request.module, name):
            monkeypatch.setattr(request.module, name, adapter)
    yield
    if _opened:
        _used.append(request.node.nodeid)
    for memory in _opened.values():
        memory.check()
        memory.close()
    _opened.clear()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say in how many tests an adapter stood in."""
    terminalreporter.write_line(f"adapters in {len(_used)} tests")
