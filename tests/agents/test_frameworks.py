"""Adapters whose framework is missing, too old, or newer than what was tested."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

import ctxreuse_agents.adapters
import pytest
from ctxreuse_agents.adapters.frameworks import framework

from ctxreuse.errors import ConfigError

#: Adapters that need a package, and that package.
NEEDS = {
    "AdkSessionService": "google-adk",
    "LangGraphSaver": "langgraph-checkpoint",
    "LangGraphStore": "langgraph-checkpoint",
    "LlamaIndexChatStore": "llama-index-core",
    "OpenAIAgentsModel": "openai-agents",
    "OpenAISession": "openai-agents",
}


@pytest.mark.parametrize(("name", "package"), NEEDS.items())
def test_a_missing_framework_is_named_with_the_command_that_installs_it(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("langgraph", "agents", "llama_index", "google.adk"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"{package} .*Run: pip install '{package}>="):
        getattr(ctxreuse_agents.adapters, name)


def test_importing_the_room_imports_no_adapter() -> None:
    assert {"LangGraphSaver", "MemoryTool"} <= set(dir(ctxreuse_agents.adapters))
    with pytest.raises(AttributeError):
        ctxreuse_agents.adapters.nothing  # noqa: B018
    assert importlib.import_module("ctxreuse_agents.adapters") is ctxreuse_agents.adapters


@pytest.mark.parametrize(("first", "beyond"), [("1.0", "999"), ("0.0.1", "999.1")])
def test_a_tested_version_is_silent(first: str, beyond: str) -> None:
    with framework("pytest", first, beyond):
        pass


def test_another_version_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.10.1rc1")
    with (
        pytest.warns(UserWarning, match="2.10.1rc1 is newer .* pip install 'some<2.10'"),
        framework("some", "2.9", "2.10"),
    ):
        pass
    with pytest.raises(ConfigError, match=r"older than 2\.11"), framework("some", "2.11", "3"):
        pass
    with pytest.raises(ConfigError, match="is not what this adapter needs"), framework("some", "2", "3"):
        raise ImportError("no name 'x'")
