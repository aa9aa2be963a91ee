"""Which of several nodes answers a request: one price in seconds for each. No input or output, times are arguments."""

from ctxreuse.routing.events import MOST_BYTES
from ctxreuse.routing.feed import EventFeed, Reported, Source
from ctxreuse.routing.known import KnownPrefixes, PrefixRun
from ctxreuse.routing.node import NodeLoad
from ctxreuse.routing.reported import PromptTokens, ReportedBlocks
from ctxreuse.routing.router import Route, RouteOption, Router, wasted_price

__all__ = [
    "MOST_BYTES",
    "EventFeed",
    "KnownPrefixes",
    "NodeLoad",
    "PrefixRun",
    "PromptTokens",
    "Reported",
    "ReportedBlocks",
    "Route",
    "RouteOption",
    "Router",
    "Source",
    "wasted_price",
]
