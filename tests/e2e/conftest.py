"""A small real model in a folder, and clouds, edges and links between them as processes over real sockets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for cluster.py


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama with random weights that computes some thousand tokens a second: slower than loopback
    brings them, so that fetching pays."""
    from cluster import save_model

    return save_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def cluster(tmp_path: Path, model: Path) -> Iterator[object]:
    """A `cluster.Cluster`; what a test leaves running is ended."""
    from cluster import Cluster

    made = Cluster(tmp_path, model)
    yield made
    made.close()
