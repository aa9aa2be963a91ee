"""Which engine runs a model: the one asked for, else the fastest that is installed and can."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ctxreuse.engines import open_engine, registry
from ctxreuse.engines.registry import choose_engine
from ctxreuse.errors import ConfigError

NAME = "smollm2"


@pytest.fixture(autouse=True)
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no ONNX folder had been built of the user's models."""
    monkeypatch.setattr(registry.models, "built_of", lambda name: [])


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    """without("torch", …): as if these packages were not installed."""

    def hide(*names: str) -> None:
        monkeypatch.setattr(registry, "find_spec", lambda name: None if name in names else find_spec(name))

    return hide


def test_the_fastest_that_can() -> None:
    assert choose_engine(NAME) == "llama_cpp"
    assert choose_engine(NAME, typed=True) == "torch"
    assert choose_engine(NAME, "torch") == "torch"
    assert choose_engine("/models/Some.GGUF") == "llama_cpp"
    assert choose_engine("/models/folder") == "torch"


def test_what_is_not_installed_is_passed_over_or_named_with_its_extra(without) -> None:
    without("xllamacpp")
    assert choose_engine(NAME) == "torch"
    assert choose_engine(NAME, "llama_cpp", library="/usr/lib/libllama.so") == "llama_cpp"
    with pytest.raises(ConfigError, match=r"llama_cpp needs xllamacpp.*ctxreuse\[llamacpp\]"):
        choose_engine("model.gguf")
    without("torch", "transformers")
    assert choose_engine(NAME) == "llama_cpp"
    for asked in ({"engine": "torch"}, {"typed": True}):
        with pytest.raises(ConfigError, match=r"torch needs torch, transformers.*ctxreuse\[torch\]"):
            choose_engine(NAME, **asked)
    without("torch", "xllamacpp")
    with pytest.raises(ConfigError, match=r"llama_cpp needs.* and .*torch needs.*\[llamacpp\].*or.*\[torch\]"):
        open_engine(NAME)


def test_an_engine_or_setting_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="no such engine: 'gguf'"):
        choose_engine(NAME, "gguf")
    with pytest.raises(ConfigError, match="no settings attention"):
        open_engine("model.gguf", attention="sdpa")
