"""Contracts of engines: the one that all keep, and those of levels, chunk reuse and in-place attention."""

from __future__ import annotations

from ctxreuse.testing.engine.contract import (
    EngineContract,
    Sealed,
    continuation,
    random_tokens,
    resume,
    seal,
    views,
)

__all__ = ["EngineContract", "Sealed", "continuation", "random_tokens", "resume", "seal", "views"]
