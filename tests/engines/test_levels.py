"""Kinds of model that differ in what they keep pass the contract of levels."""

import pytest

from ctxreuse.testing.engine.levels import EngineLevelsContract


@pytest.mark.parametrize("engine", ["llama", "gemma3", "mistral", "granitemoehybrid"], indirect=True, scope="class")
class TestTiny(EngineLevelsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request, engine_of):
        return engine_of(request.param)


class TestInThread(EngineLevelsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, engine_of):
        return engine_of("llama", background=True)
