"""A decoder on ONNX Runtime passes the contracts of engines and of levels."""

import pytest

from ctxreuse.engines import open_engine
from ctxreuse.testing.engine import EngineContract
from ctxreuse.testing.engine.levels import EngineLevelsContract


@pytest.fixture(scope="class")
def engine(onnx_folder):
    return open_engine(onnx_folder, block_tokens=16, chunk=64, threads=1)


class TestOnnxRuntime(EngineContract):
    pass


class TestLevels(EngineLevelsContract):
    pass
