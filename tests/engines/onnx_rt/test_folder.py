"""What an ONNX folder may be: text, restarts after SIGKILL, folders that are refused, how one is built and found."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ctxreuse import LLM
from ctxreuse.cli.models import app
from ctxreuse.config import EngineConfig
from ctxreuse.engines import open_engine, registry
from ctxreuse.engines.onnx_rt.arena import KvSlot
from ctxreuse.engines.text import Message
from ctxreuse.errors import ConfigError, CtxReuseError, EngineError, FormatError
from ctxreuse.models import build as builder
from ctxreuse.models.build import build
from ctxreuse.testing.sealed import continuation, random_tokens

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8

WRITER = """
import os, signal, sys
from ctxreuse import LLM
llm = LLM(sys.argv[1], store=sys.argv[2], threads=1)
print(llm.generate(sys.argv[3], max_tokens=8, ignore_eos=True).tokens, flush=True)
assert not {"torch", "transformers"} & set(sys.modules)
llm.store.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_context_outlives_a_killed_process_without_torch(onnx_folder: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", WRITER, str(onnx_folder), str(tmp_path / "store"), PROMPT]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stderr == ""  # onnxruntime's own messages are raised
    with LLM(onnx_folder, store=tmp_path / "store", threads=1) as llm:
        again = llm.generate(PROMPT, max_tokens=8, ignore_eos=True)
    assert str(again.tokens) == done.stdout.strip()
    assert again.usage.tokens.cached >= len(PROMPT) // 64 * 64 - 64


def test_numbers_are_those_of_the_model_it_was_built_of(hf_folder: Path, onnx_folder: Path) -> None:
    ours, theirs = open_engine(onnx_folder, threads=1), open_engine(hf_folder, threads=1)
    ids = random_tokens(theirs, 100)
    a, b = ours.new_context(), theirs.new_context()
    found = continuation(ours, a, ours.prefill(a, ids), 3)
    expected = continuation(theirs, b, theirs.prefill(b, ids), 3)
    for one, two in zip(found, expected):
        assert np.abs(one - two).max() <= 1e-4 * np.abs(two).max()


def test_text_is_that_of_the_folder(onnx_folder: Path) -> None:
    text = open_engine(onnx_folder, threads=1).text
    assert text is not None
    assert text.stop_ids == {257}
    prompt = text.render([Message("user", "hi")], generate=True)
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert text.decode(text.encode("né\n 12")) == "né\n 12"


def test_other_weights_or_blocks_are_another_space(hf_folder: Path, onnx_folder: Path, tmp_path: Path) -> None:
    spaces = [open_engine(onnx_folder, threads=1).space, open_engine(onnx_folder, threads=1, block_tokens=16).space]
    other = shutil.copytree(onnx_folder, tmp_path / "other")
    assert open_engine(other, threads=1).space == spaces[0]
    weights = other / "model.onnx.data"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    spaces.append(open_engine(other, threads=1).space)
    spaces.append(open_engine(hf_folder, threads=1).space)
    assert len({space.digest for space in spaces}) == 4
    assert len({space.tokenizer for space in spaces}) == 1  # so that agents find it where the model is
    assert spaces[0].attention.startswith("onnxruntime-1.")
    assert spaces[0].rope == '{"rotated": true}'


def test_the_engine_follows_from_the_folder(hf_folder: Path, onnx_folder: Path, tmp_path: Path) -> None:
    assert onnx_folder == hf_folder / "onnx" / "fp32"
    for given in (onnx_folder, hf_folder):  # a model's own folder holds what was built of it
        engine = open_engine(given, engine="onnxruntime", threads=1)
        assert engine.space == open_engine(onnx_folder, threads=1).space
    assert not open_engine(hf_folder, threads=1).space.architecture.startswith("onnx/")
    with pytest.raises(ConfigError, match=r"model build .* --engine onnxruntime"):
        open_engine(tmp_path, engine="onnxruntime")
    with pytest.raises(ConfigError, match="cannot use cuda"):
        open_engine(onnx_folder, provider="cuda")


def test_a_known_name_means_what_was_built_of_it(
    onnx_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CTXREUSE_MODELS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(ConfigError, match="model build smollm2 --engine onnxruntime"):
        open_engine("smollm2", engine="onnxruntime", threads=1)
    shutil.copytree(onnx_folder, tmp_path / "smollm2" / "onnx" / "fp32")
    assert open_engine("smollm2", engine="onnxruntime", threads=1).space == open_engine(onnx_folder, threads=1).space
    with pytest.raises(ConfigError, match="--provider cuda"):
        open_engine("smollm2", engine="onnxruntime", provider="cuda")
    assert "MB: ONNX fp32" in CliRunner().invoke(app, ["ls"]).stdout
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name in ("xllamacpp", "torch") else name)
    assert registry.choose_engine("smollm2") == "onnxruntime"
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name == "onnxruntime" else name)
    with pytest.raises(ConfigError, match=r"ctxreuse\[onnx\]"):
        registry.choose_engine(str(onnx_folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"search": {"past_present_share_buffer": False}}, "append to K and V in place"),
        ({"model": {"decoder": {"sliding_window": {"slide_key_value_cache": True}}}}, "sliding windows"),
        ({"model": {"decoder": {"inputs": {"past_key_names": "other.%d.key"}}}}, "graph has no"),
        ({"model": {"decoder": {"num_hidden_layers": 1}}}, "also needs"),
        ({"model": {"decoder": {"filename": "../model.onnx"}}}, "not in the folder"),
        ({"model": {"decoder": {"head_size": 32}}}, "onnxruntime could not compute"),
        ({"model": {"decoder": {"inputs": {"past_key_names": "no number"}}}}, "cannot be read"),
    ],
)
def test_a_folder_that_contexts_cannot_be_kept_of_is_refused(
    onnx_folder: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = shutil.copytree(onnx_folder, tmp_path / "changed")
    file = folder / "genai_config.json"
    file.write_text(json.dumps(merged(json.loads(file.read_text()), change)))
    with pytest.raises((EngineError, FormatError), match=message):
        open_engine(folder, threads=1)


def merged(old: dict[str, object], new: dict[str, object]) -> dict[str, object]:
    for name, value in new.items():
        below = old.get(name)
        old[name] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return old


def test_truncated_files_are_refused(onnx_folder: Path, tmp_path: Path) -> None:
    folder, rng = shutil.copytree(onnx_folder, tmp_path / "cut"), random.Random(5)
    for name in ("genai_config.json", "model.onnx", "model.onnx.data"):
        data = (folder / name).read_bytes()
        for cut in (0, *(rng.randrange(8, len(data) - 1) for _ in range(10))):
            (folder / name).write_bytes(data[:cut])
            with pytest.raises(CtxReuseError):
                open_engine(folder, threads=1)
        (folder / name).write_bytes(data)
    assert open_engine(folder, threads=1).space.vocab_size == 258


def test_what_cannot_be_built_says_why(
    hf_folder: Path, onnx_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build(str(hf_folder), "fp32", progress=False) == onnx_folder  # it is there
    with pytest.raises(ConfigError, match="other things in it"):
        build(str(hf_folder), out=hf_folder)
    with pytest.raises(ConfigError, match="int4, fp16, fp32"):
        build(str(hf_folder), "int3")
    result = CliRunner().invoke(app, ["build", str(hf_folder), "--engine", "torch"])
    assert "nothing has to be built" in str(result.exception)
    monkeypatch.setattr(builder, "find_spec", lambda name: None if name == "onnx_ir" else name)
    with pytest.raises(ConfigError, match=r"needs onnx_ir.*ctxreuse\[onnx-build\]"):
        build(str(hf_folder), out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_builder_that_fails_leaves_nothing(hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(EngineError, match="builder failed"):
        build(str(hf_folder), out=tmp_path / "made" / "out", progress=False)
    assert list((tmp_path / "made").iterdir()) == []


def test_a_failure_in_a_step_changes_nothing(onnx_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(EngineConfig(str(onnx_folder), threads=1, chunk=16))
    ids = random_tokens(engine, 64)
    context, twin = engine.new_context(), engine.new_context()
    for one in (context, twin):
        engine.prefill(one, ids[:20])
    compute, calls = KvSlot.compute, list[int]()

    def failing(self: KvSlot, part: object, at: int) -> object:
        calls.append(at)
        if len(calls) == 2:
            raise EngineError("out of memory")
        return compute(self, part, at)  # type: ignore[arg-type]

    monkeypatch.setattr(KvSlot, "compute", failing)
    with pytest.raises(EngineError, match="out of memory"):
        engine.prefill(context, ids[20:])
    assert context.n == 20
    assert np.array_equal(engine.prefill(context, ids[20:]), engine.prefill(twin, ids[20:]))
