"""The life of a request on one node: match what is held, load it, compute the rest, generate, keep what is new."""

from ctxreuse.runtime.completion import Completion
from ctxreuse.runtime.runtime import Runtime
from ctxreuse.runtime.usage import Prefilled, Usage

__all__ = ["Completion", "Prefilled", "Runtime", "Usage"]
