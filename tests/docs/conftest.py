"""A small real model in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama with random weights."""
    from support.cluster import save_slow_model

    return save_slow_model(tmp_path_factory.mktemp("models") / "small")
