"""Pauses of agents' contexts: why they stopped, when they will return, and what to do with them until then. Pure."""

from __future__ import annotations

from ctxreuse.pauses.estimator import Estimator, Pause
from ctxreuse.pauses.hazard import Ahead, load_ahead
from ctxreuse.pauses.hints import HINTS, Hint
from ctxreuse.pauses.kinds import PauseKind, infer, kind_of, tools_in
from ctxreuse.pauses.sessions import Sessions, State

__all__ = [
    "HINTS",
    "Ahead",
    "Estimator",
    "Hint",
    "Pause",
    "PauseKind",
    "Sessions",
    "State",
    "infer",
    "kind_of",
    "load_ahead",
    "tools_in",
]
