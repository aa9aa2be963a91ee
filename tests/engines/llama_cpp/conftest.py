"""A tiny GGUF and engines on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a Llama with random weights."""
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
