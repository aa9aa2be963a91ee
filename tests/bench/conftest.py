"""Tiny models with random weights: one with full attention only, one with windows."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def engine_of() -> Iterator[Callable[[str], Any]]:
    """engine_of("llama" | "gemma3") -> an engine in float32 on one thread, the same weights each time."""
    import torch

    from ctxreuse.engines.torch_hf import TorchEngine

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    tiny_model = runpy.run_path(str(Path(__file__).parents[1] / "engines" / "tiny_models.py"))["tiny_model"]
    yield lambda name: TorchEngine(tiny_model(name))
    torch.set_num_threads(before)
