"""The tiny models of `tiny_models.py`, and the real ones where a test is marked so."""

import pytest

from ctxreuse.engines.torch_hf import TorchEngine
from support import tiny_models


@pytest.fixture(scope="session")
def gemma():
    """Gemma 3 270M in float32."""
    return TorchEngine.open("gemma3-270m")


@pytest.fixture(scope="session")
def tiny():
    """tiny(name) -> a new model with the same random weights each time, float32, evaluation mode."""
    return tiny_models.tiny_model


@pytest.fixture(scope="session")
def engine_of():
    """engine_of(name, **options) -> an engine on a tiny model with blocks of 16 tokens."""

    return tiny_models.engine_of
