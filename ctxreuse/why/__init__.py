"""Why was this a miss: what each request missed, how it differed from earlier ones, and what to do about it."""

from ctxreuse.why.difference import Difference, Divergence, divergence
from ctxreuse.why.explain import explain
from ctxreuse.why.explanation import Field, PromptSpan, Why
from ctxreuse.why.log import FILE, OpenRequest, RequestLog, read_requests
from ctxreuse.why.reasons import REASONS
from ctxreuse.why.records import LoggedEntry, MissSpan, PromptPart, Reordered, RequestInfo

__all__ = [
    "FILE",
    "REASONS",
    "Difference",
    "Divergence",
    "Field",
    "LoggedEntry",
    "MissSpan",
    "OpenRequest",
    "PromptPart",
    "PromptSpan",
    "Reordered",
    "RequestInfo",
    "RequestLog",
    "Why",
    "divergence",
    "explain",
    "read_requests",
]
