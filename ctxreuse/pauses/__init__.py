"""Pauses of agents' contexts: why they stopped, when they will return, and what to do with them until then. Pure."""

from __future__ import annotations

from ctxreuse.pauses.estimator import Estimator, Pause
from ctxreuse.pauses.hints import HINTS, Hint
from ctxreuse.pauses.kinds import Kind, infer, kind_of, tools_in
from ctxreuse.pauses.sessions import Sessions, State
from ctxreuse.pauses.tiers import Ahead, Candidate, Step, load_ahead, make_room

__all__ = [
    "HINTS",
    "Ahead",
    "Candidate",
    "Estimator",
    "Hint",
    "Kind",
    "Pause",
    "Sessions",
    "State",
    "Step",
    "infer",
    "kind_of",
    "load_ahead",
    "make_room",
    "tools_in",
]
