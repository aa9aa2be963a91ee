"""Engines run a model and let its contexts be loaded, continued and exported; each is imported when it is opened."""

from __future__ import annotations

from ctxreuse.engines.base import Context, Engine, Loading
from ctxreuse.engines.registry import open_draft_engine, open_engine, open_for_calibration

__all__ = ["Context", "Engine", "Loading", "open_draft_engine", "open_engine", "open_for_calibration"]
