"""The lab: traces of requests, replayed through the policies that the store uses, beside the bounds."""

from __future__ import annotations

from ctxreuse.lab.opening import open_trace
from ctxreuse.lab.trace import Request, Trace

__all__ = ["Request", "Trace", "open_trace"]
