"""Tiny models with random weights: one with full attention only, one with windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def engine_of() -> Callable[[str], Any]:
    """engine_of("llama" | "gemma3") -> an engine in float32 with blocks of 64 tokens, the same weights each time."""
    from support import tiny_models

    return lambda name: tiny_models.engine_of(name, block_tokens=64, chunk=512)
