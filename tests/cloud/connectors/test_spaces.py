"""The space of a model in another engine: whatever changes its numbers changes the digest, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ctxreuse_cloud.connectors.spaces import EngineModel, space_of, torch_space_of

from ctxreuse.errors import ConfigError
from support.tiny_text import save_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> EngineModel:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    config = {"rms_norm_eps": 1e-5, "_name_or_path": str(folder), "transformers_version": "5.23"}
    options: dict[str, Any] = {"quantization": None, "dtype": "torch.bfloat16"}
    rope = {"rope_type": "default", "rope_theta": 10_000}
    numbers: dict[str, Any] = {"vocab_size": 512, "max_tokens": 2048, "page_tokens": 128}
    return EngineModel(
        str(folder), "", "Llama", config, options, "bfloat16", ((3, 64),) * 2, rope, **numbers
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "Qwen"},
        {"config": {"rms_norm_eps": 1e-6}},
        {"options": {"quantization": "awq", "dtype": "torch.bfloat16"}},
        {"dtype": "float32"},
        {"layers": ((3, 64),)},
        {"layers": ((6, 32),) * 2},
        {"rope": None},
        {"rope": {"rope_type": "default", "rope_theta": 20_000}},
        {"page_tokens": 64},
        {"max_tokens": 4096},
    ],
)
def test_a_change_of_the_numbers_is_another_space(model: EngineModel, change: dict[str, Any]) -> None:
    assert space_of(msgspec.structs.replace(model, **change)).digest != space_of(model).digest


def test_the_bytes_of_weights_and_tokenizer_count_and_not_where_they_lie(model: EngineModel, tmp_path: Path) -> None:
    before = space_of(model).digest
    folder = tmp_path / "moved"
    Path(model.model).rename(folder)
    config = {**model.config, "_name_or_path": str(folder), "transformers_version": "6.0"}
    model = msgspec.structs.replace(model, model=str(folder), config=config)
    assert space_of(model).digest == before
    (folder / "tokenizer.json").write_text('{"a": 1}')
    other = space_of(model).digest
    assert other != before
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert space_of(model).digest not in (before, other)


def test_weights_of_a_hub_are_known_by_their_commit(model: EngineModel) -> None:
    hub = msgspec.structs.replace(model, model="someone/model", commit="a" * 40)
    assert space_of(hub).digest != space_of(msgspec.structs.replace(hub, commit="b" * 40)).digest
    with pytest.raises(ConfigError, match="local folder"):
        space_of(msgspec.structs.replace(hub, commit=""))


@pytest.fixture
def served(tmp_path: Path) -> tuple[EngineModel, Any]:
    """A folder of the tiny Llama as vLLM would run it in float32, and its config."""
    from transformers import AutoConfig

    folder = save_model(tmp_path / "llama")
    config = AutoConfig.from_pretrained(folder)
    options: dict[str, Any] = {"quantization": None, "load_format": "auto", "dtype": "torch.float32"}
    numbers: dict[str, Any] = {"vocab_size": 258, "max_tokens": 2048, "page_tokens": 128}
    return EngineModel(
        str(folder), "", "LlamaForCausalLM", {}, options, "float32", ((2, 8),) * 2, None, **numbers
    ), config  # fmt: skip


def test_the_space_shared_with_the_torch_engine_is_its_own(served: tuple[EngineModel, Any]) -> None:
    from ctxreuse.engines.torch_hf import TorchEngine

    model, config = served
    assert torch_space_of(model, config) == TorchEngine.open(model.model).space
    halved = msgspec.structs.replace(model, dtype="bfloat16", options={**model.options, "dtype": "torch.bfloat16"})
    assert torch_space_of(halved, config) == TorchEngine.open(model.model, dtype="bfloat16").space


@pytest.mark.parametrize(
    ("field", "value"), [("rms_norm_eps", 1e-4), ("head_dim", 16), ("rope_parameters", {"rope_theta": 5e5})]
)
def test_a_changed_config_is_not_the_torch_engines_space(
    served: tuple[EngineModel, Any], field: str, value: Any
) -> None:
    model, config = served
    before = torch_space_of(model, config).digest
    if isinstance(value, dict):
        value = {**config.rope_parameters, **value}
    setattr(config, field, value)
    assert torch_space_of(model, config).digest != before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "someone/model"}, "no local folder"),
        ({"architecture": "Gemma3ForCausalLM"}, "it is a Gemma3ForCausalLM"),
        ({"options": {"quantization": "awq", "load_format": "auto", "dtype": "torch.float32"}}, "its quantization"),
        ({"options": {"quantization": None, "load_format": "dummy", "dtype": "torch.float32"}}, "its load_format"),
        ({"dtype": "bfloat16"}, "its dtype"),
    ],
)
def test_what_was_not_compared_with_the_torch_engine_is_refused(
    served: tuple[EngineModel, Any], change: dict[str, Any], reason: str
) -> None:
    model, config = served
    with pytest.raises(ConfigError, match=reason):
        torch_space_of(msgspec.structs.replace(model, **change), config)


def test_another_kind_of_rotation_is_refused(served: tuple[EngineModel, Any]) -> None:
    model, config = served
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ConfigError, match="rotates by dynamic"):
        torch_space_of(model, config)
