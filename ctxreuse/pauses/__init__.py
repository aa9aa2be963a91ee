"""Pauses of agents' contexts: why they stopped, when they will return, and what to do with them until then. Pure."""

from __future__ import annotations

from ctxreuse.pauses.estimator import Estimator, Pause
from ctxreuse.pauses.hints import HINTS, Hint
from ctxreuse.pauses.kinds import Kind, infer, kind_of
from ctxreuse.pauses.sessions import Sessions, State

__all__ = ["HINTS", "Estimator", "Hint", "Kind", "Pause", "Sessions", "State", "infer", "kind_of"]
