"""The kernels' text compiled for this processor, once a session."""

from pathlib import Path

import pytest

from ctxreuse.testing.shim import Shim, build_shim

SOURCE = Path(__file__).resolve().parents[2] / "native" / "cuda"


@pytest.fixture(scope="session")
def source() -> Path:
    return SOURCE


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return Shim(build_shim(SOURCE, tmp_path_factory.mktemp("shim")))
