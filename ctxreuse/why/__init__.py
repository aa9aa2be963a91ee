"""Why was this a miss: what every request lacked, what it differed in from earlier ones, and what to do about it."""

from ctxreuse.why.book import FILE, RequestBook, read_requests
from ctxreuse.why.difference import Difference, Parting, common_prefix, parting
from ctxreuse.why.explain import Field, Span, Why, explain
from ctxreuse.why.reasons import REASONS
from ctxreuse.why.records import About, Part

__all__ = [
    "FILE",
    "REASONS",
    "About",
    "Difference",
    "Field",
    "Part",
    "Parting",
    "RequestBook",
    "Span",
    "Why",
    "common_prefix",
    "explain",
    "parting",
    "read_requests",
]
