"""An engine in a child process: what crashes there ends its contexts, not this process."""

from ctxreuse.engines.process.engine import ChildEngine, EngineStart, open_child_engine

__all__ = ["ChildEngine", "EngineStart", "open_child_engine"]
