"""An engine in a child process: what crashes there ends its contexts, not this process."""

from ctxreuse.engines.process.engine import ChildEngine, open_child_engine

__all__ = ["ChildEngine", "open_child_engine"]
