"""A tiny decoder as onnxruntime-genai's builder makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxreuse.models.build import build
from support.tiny_text import save_model


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights as a Hugging Face folder; its heads are as wide as GroupQueryAttention wants them."""
    folder = tmp_path_factory.mktemp("tiny")
    return save_model(folder, hidden_size=64, intermediate_size=128, head_dim=16)


@pytest.fixture(scope="session")
def onnx_folder(hf_folder: Path) -> Path:
    """Its decoder in float32."""
    return build(str(hf_folder), "fp32", progress=False)
