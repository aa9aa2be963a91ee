"""Doors for agent frameworks: each adapter is imported when it is first used, and its framework with it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxreuse_agents.adapters.google_adk import AdkMemoryService, AdkSessionService
    from ctxreuse_agents.adapters.langgraph_saver import LangGraphSaver
    from ctxreuse_agents.adapters.langgraph_store import LangGraphStore
    from ctxreuse_agents.adapters.llama_index import LlamaIndexChatStore, LlamaIndexMemoryBlock
    from ctxreuse_agents.adapters.mem0 import Mem0Memory
    from ctxreuse_agents.adapters.mem0_store import Mem0Embedder, Mem0VectorStore
    from ctxreuse_agents.adapters.memory_tool import MemoryTool
    from ctxreuse_agents.adapters.openai_model import OpenAIAgentsModel, OpenAIAgentsProvider
    from ctxreuse_agents.adapters.openai_session import OpenAISession

__all__ = [
    "AdkMemoryService",
    "AdkSessionService",
    "LangGraphSaver",
    "LangGraphStore",
    "LlamaIndexChatStore",
    "LlamaIndexMemoryBlock",
    "Mem0Embedder",
    "Mem0Memory",
    "Mem0VectorStore",
    "MemoryTool",
    "OpenAIAgentsModel",
    "OpenAIAgentsProvider",
    "OpenAISession",
]

_MODULES = {
    "AdkMemoryService": "google_adk",
    "AdkSessionService": "google_adk",
    "LangGraphSaver": "langgraph_saver",
    "LangGraphStore": "langgraph_store",
    "LlamaIndexChatStore": "llama_index",
    "LlamaIndexMemoryBlock": "llama_index",
    "Mem0Embedder": "mem0_store",
    "Mem0Memory": "mem0",
    "Mem0VectorStore": "mem0_store",
    "MemoryTool": "memory_tool",
    "OpenAIAgentsModel": "openai_model",
    "OpenAIAgentsProvider": "openai_model",
    "OpenAISession": "openai_session",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
