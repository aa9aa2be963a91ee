"""A GGUF on llama.cpp passes the contracts of engines and of levels."""

import pytest

from ctxreuse.engines import open_engine
from ctxreuse.testing.engine import EngineContract
from ctxreuse.testing.engine.levels import EngineLevelsContract
from support.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="class")
def engine(gguf_file):
    return open_engine(gguf_file, block_tokens=16, chunk=64, threads=1)


class TestLlamaCpp(EngineContract):
    #: llama.cpp keeps K, V and their weighted sum as float16.
    tolerance = 5e-3


class TestLevels(EngineLevelsContract):
    pass


class TestWindows(EngineContract):
    """Gemma 3: some layers have sliding windows, which are states."""

    tolerance = 5e-3

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory):
        file = write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "windows.gguf", window=24)
        return open_engine(file, block_tokens=16, chunk=64, threads=1)


class TestWindowsLevels(EngineLevelsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory):
        file = write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "windows.gguf", window=24)
        return open_engine(file, block_tokens=16, chunk=64, threads=1)
