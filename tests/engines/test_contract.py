"""Every kind of model passes the engine contract."""

import pytest

from ctxreuse.testing.engine import EngineContract


@pytest.mark.parametrize(
    "engine",
    [
        "llama",
        "qwen2",
        "gpt2",
        "gemma3",
        "mistral",
        "qwen3next",
        "lfm2",
        "falconh1",
        "granitemoehybrid",
        "bamba",
        "jamba",
        "nemotronh",
        "zamba2",
        "mamba2",
        "mamba",
        "olmohybrid",
        "zaya",
    ],
    indirect=True,
    scope="class",
)
class TestTiny(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request, engine_of):
        return engine_of(request.param)


class TestLoadInThread(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, engine_of):
        return engine_of("llama", background=True)


class TestLoadInPrefill(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, engine_of):
        return engine_of("llama", background=False)


@pytest.mark.parametrize("name", ["gemma3", "mistral"], scope="class")
class TestWholeWindows(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, name, engine_of):
        return engine_of(name, whole=True)
