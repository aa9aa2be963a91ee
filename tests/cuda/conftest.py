"""The kernels' text compiled for this processor."""

from pathlib import Path

import pytest

from support import native_builds
from support.shim import Shim


@pytest.fixture(scope="session")
def source() -> Path:
    return native_builds.CUDA_TEXT


@pytest.fixture(scope="session")
def shim() -> Shim:
    return Shim(native_builds.shim())
