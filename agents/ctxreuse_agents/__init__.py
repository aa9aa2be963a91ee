"""Agent memory without a server: durable sessions over a KV store that makes returning to them cheap."""

from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.text import Message
from ctxreuse.runtime import Usage
from ctxreuse.store import Hit, NewTurn, Turn
from ctxreuse_agents.aio import AsyncAnswer, AsyncMemory, AsyncSession
from ctxreuse_agents.answer import Answer
from ctxreuse_agents.memory import Memory, MemoryStats
from ctxreuse_agents.recalled import Recalled
from ctxreuse_agents.retention import KeepLimits
from ctxreuse_agents.session import Diff, Session

__all__ = [
    "Answer",
    "AsyncAnswer",
    "AsyncMemory",
    "AsyncSession",
    "Diff",
    "Hit",
    "KeepLimits",
    "Memory",
    "MemoryStats",
    "Message",
    "NewTurn",
    "Recalled",
    "SamplingParams",
    "Session",
    "Turn",
    "Usage",
]
