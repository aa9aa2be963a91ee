"""A small real model in a folder, and clouds, edges and links between them as processes over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama with random weights that computes some thousand tokens a second: slower than loopback
    brings them, so that fetching pays."""
    from support.cluster import save_slow_model

    return save_slow_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def cluster(tmp_path: Path, model: Path) -> Iterator[object]:
    """A `cluster.Cluster`; what a test leaves running is ended."""
    from support.cluster import Cluster

    made = Cluster(tmp_path, model)
    yield made
    made.close()
