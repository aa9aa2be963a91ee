"""The tiny models of `tiny_models.py`, and the real ones where a test is marked so."""

import runpy
from pathlib import Path

import pytest
import torch

from ctxreuse.engines.torch_hf import TorchEngine

_tiny = runpy.run_path(str(Path(__file__).with_name("tiny_models.py")))["tiny_model"]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny matrices are slower with two threads, and a busy machine makes spinning threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32."""
    return TorchEngine.open("smollm2")


@pytest.fixture(scope="session")
def gemma():
    """Gemma 3 270M in float32."""
    return TorchEngine.open("gemma3-270m")


@pytest.fixture(scope="session")
def tiny():
    """tiny(name) -> a new model with the same random weights each time, float32, evaluation mode."""
    return _tiny


@pytest.fixture(scope="session")
def engine_of(tiny):
    """engine_of(name, **options) -> an engine on a tiny model with blocks of 16 tokens."""

    def make(name: str, **options) -> TorchEngine:
        return TorchEngine(tiny(name), **{"block_tokens": 16, "chunk": 64, **options})

    return make
