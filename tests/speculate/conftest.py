"""Tiny engines of all three kinds, with the same text."""

from __future__ import annotations

from typing import Any

import pytest

from support.tiny_gguf import write_tiny_gguf
from support.tiny_text import save_model, tiny_engine


@pytest.fixture(scope="session", params=["torch", "llama_cpp", "onnxruntime"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from ctxreuse.engines import open_engine

    if request.param == "torch":
        return tiny_engine()
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama_cpp":
        return open_engine(str(write_tiny_gguf(folder / "tiny.gguf")), threads=1)
    from ctxreuse.models.build import build

    made = save_model(folder / "tiny", hidden_size=64, intermediate_size=128, head_dim=16)
    return open_engine(str(build(str(made), "fp32", progress=False)), threads=1)
