"""Which of several nodes answers a request: one price in seconds for each. No input or output, times are arguments."""

from ctxreuse.routing.known import KnownPrefixes, PrefixRun
from ctxreuse.routing.node import NodeLoad
from ctxreuse.routing.router import Route, RouteOption, Router, wasted_price

__all__ = ["KnownPrefixes", "NodeLoad", "PrefixRun", "Route", "RouteOption", "Router", "wasted_price"]
