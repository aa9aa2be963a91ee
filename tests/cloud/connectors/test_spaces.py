"""The space of a model in another engine: whatever changes its numbers changes the digest, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ctxreuse_cloud.connectors.spaces import EngineModel, space_of

from ctxreuse.errors import ConfigError


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
