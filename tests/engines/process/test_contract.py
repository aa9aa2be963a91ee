"""An engine in a process of its own passes the contracts of engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ctxreuse.engines.process.engine import ChildEngine, EngineStart
from ctxreuse.testing.engine import EngineContract
from ctxreuse.testing.engine.chunks import EngineChunksContract
from ctxreuse.testing.engine.compressed import EngineCompressionContract
from ctxreuse.testing.engine.levels import EngineLevelsContract


class TestChild(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, child: ChildEngine) -> ChildEngine:
        return child


class TestChildLevels(EngineLevelsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, child: ChildEngine) -> ChildEngine:
        return child


class TestChildChunks(EngineChunksContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, child: ChildEngine) -> ChildEngine:
        return child


class TestChildCompression(EngineCompressionContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, child: ChildEngine) -> ChildEngine:
        return child


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["falconh1", "gemma3", "mistral"], scope="class")
class TestChildWithStates(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, name: str, python_path: None) -> Iterator[ChildEngine]:
        engine = EngineStart("support.tiny_models:engine_of", {"name": name}).opened()
        yield engine
        engine.close()
