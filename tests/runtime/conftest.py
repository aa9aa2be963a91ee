"""A tiny random-weight Llama and a tiny Gemma 3 with sliding windows, as engines; a store on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.store import BlockStore
from support.tiny_models import engine_of


@pytest.fixture(scope="session")
def llama() -> TorchEngine:
    return engine_of("llama")


@pytest.fixture(scope="session")
def gemma() -> TorchEngine:
    return engine_of("gemma3")


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest, llama: TorchEngine, gemma: TorchEngine) -> TorchEngine:
    return {"llama": llama, "gemma": gemma}[request.param]


@pytest.fixture(scope="session")
def other_llama() -> TorchEngine:
    """The same architecture with other weights: another model space."""
    return engine_of("llama", seed=1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    with BlockStore.open(tmp_path, capacity=64 << 20) as opened:
        yield opened
        opened.flush()
        opened.check()
