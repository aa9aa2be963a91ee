"""The cache lists, resolves and removes models, and hashes weights once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ctxreuse import models
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.models import cache
from support.examples import examples


def sha(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def make_card(folder: Path, weights: bytes, **changes: object) -> cache.ModelRecord:
    """A converted-looking folder: weights, config and a card that fits."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{}")
    stat = (folder / "model.safetensors").stat()
    fields: dict[str, object] = {
        "schema": cache.RECORD_SCHEMA,
        "name": folder.name,
        "title": "t",
        "source": ("p==1",),
        "licence": "l",
        "gguf_sha256": models.CATALOG["smollm2"].gguf_sha256,
        "weights_sha256": "c" * 64,
        "weights_bytes": stat.st_size,
        "weights_mtime_ns": stat.st_mtime_ns,
        "tokenizer_sha256": "d" * 64,
        "files": {"model.safetensors": len(weights), "config.json": 2},
    }
    card = cache.ModelRecord(**(fields | changes))  # type: ignore[arg-type]
    (folder / cache.RECORD_FILE).write_bytes(msgspec.json.encode(card))
    return card


def test_the_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CTXREUSE_MODELS", str(tmp_path))
    assert models.path("smollm2") == tmp_path / "smollm2"
    monkeypatch.delenv("CTXREUSE_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.path("smollm2") == tmp_path / "xdg" / "ctxreuse" / "models" / "smollm2"


def test_digest_of_any_folder(cache_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "b.safetensors").write_bytes(b"bb")
    (folder / "a.safetensors").write_bytes(b"a" * 10)
    (folder / "c.bin").write_bytes(b"ccc")
    (folder / "tokenizer.json").write_bytes(b"not weights")
    assert models.weights_digest(folder) == sha(b"a" * 10, b"bb", b"ccc")
    (folder / "b.safetensors").write_bytes(b"bbb")
    assert models.weights_digest(folder) == sha(b"a" * 10, b"bbb", b"ccc")
    (folder / "c.bin").rename(folder / "d.bin")
    (folder / "0.bin").write_bytes(b"0")
    assert models.weights_digest(folder) == sha(b"0", b"a" * 10, b"bbb", b"ccc")


def test_a_digest_is_computed_once_per_state(cache_root: Path, tmp_path: Path) -> None:
    file = tmp_path / "own" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"first")
    os.utime(file, ns=(1, 1_000))
    assert models.weights_digest(file.parent) == sha(b"first")
    file.write_bytes(b"other")
    os.utime(file, ns=(1, 1_000))
    # Same size and mtime: taken for the same file. This is the documented price, and the proof that nothing was read.
    assert models.weights_digest(file.parent) == sha(b"first")
    os.utime(file, ns=(1, 1_001))
    assert models.weights_digest(file.parent) == sha(b"other")
    notes = list((cache_root / ".digests").iterdir())
    assert len(notes) == 1
    notes[0].write_bytes(b"\x00damaged")
    assert models.weights_digest(file.parent) == sha(b"other")


def test_the_card_stands_for_the_weights_only_while_they_are_unchanged(cache_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    make_card(folder, b"weights")
    assert models.weights_digest(folder) == "c" * 64
    os.utime(folder / "model.safetensors", ns=(5, 5))
    assert models.weights_digest(folder) == sha(b"weights")
    (folder / "extra.bin").write_bytes(b"x")
    assert models.weights_digest(folder) == sha(b"x", b"weights")


def test_a_cache_that_cannot_be_written_stops_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("CTXREUSE_MODELS", str(tmp_path / "file"))  # a file where the folder should be
    (tmp_path / "model.safetensors").write_bytes(b"w")
    assert models.weights_digest(tmp_path) == sha(b"w")
    with pytest.raises(EngineError, match="cannot be written"), cache.exclusive("smollm2"):
        pass


def test_no_weights_is_an_error(cache_root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="safetensors"):
        models.weights_digest(tmp_path)


def test_resolve(cache_root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ctxreuse model get smollm2 --engine torch"):
        models.resolve("smollm2")
    make_card(cache_root / "smollm2", b"w")
    assert models.resolve("smollm2") == cache_root / "smollm2"
    (tmp_path / "own").mkdir()
    with pytest.raises(ConfigError, match="neither"):
        models.resolve(tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text("{}")
    assert models.resolve(tmp_path / "own") == tmp_path / "own"


def test_ls_and_rm(cache_root: Path) -> None:
    assert [(line.entry.name, line.bytes, line.record) for line in models.ls()] == [
        ("smollm2", 0, None),
        ("gemma3-270m", 0, None),
    ]
    card = make_card(cache_root / "smollm2", b"w" * 100)
    (cache_root / ".smollm2.stage").mkdir()
    line = models.ls()[0]
    assert line.record == card
    assert line.bytes > 100
    assert line.gguf is None
    (cache_root / "smollm2" / "smollm2.gguf").write_bytes(b"g")
    assert models.ls()[0].gguf == cache_root / "smollm2" / "smollm2.gguf"
    assert models.rm("smollm2") is True
    assert not (cache_root / ".smollm2.stage").exists()
    assert models.ls()[0].record is None
    assert models.rm("smollm2") is False
    with pytest.raises(ConfigError, match="Known models: smollm2, gemma3-270m"):
        models.rm("../etc")


@pytest.mark.parametrize("changes", [{"schema": 2}, {"files": {}}, {"files": {"model.safetensors": 6}}])
def test_a_card_that_does_not_fit_is_none(tmp_path: Path, changes: dict[str, object]) -> None:
    make_card(tmp_path / "m", b"weights", **changes)
    assert cache.record_of(tmp_path / "m") is None


@examples("normal", suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.dictionaries(st.text(), st.integers() | st.text()).map(msgspec.json.encode))
def test_any_bytes_for_a_card_are_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / cache.RECORD_FILE).write_bytes(data)
    assert cache.record_of(tmp_path) is None
