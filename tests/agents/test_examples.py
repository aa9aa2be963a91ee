"""The examples run as they stand."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxreuse.engines import open_engine
from ctxreuse.reuse import ChunkShelf

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *args: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert len((EXAMPLES / name).read_text().splitlines()) < 80
    return done.stdout


def test_forks(child_env: dict[str, str]) -> None:
    out = run("agent_forks.py", env=child_env)
    assert "best branch: astar" in out
    assert "bfs: 2 turns of its own, 2 that it lacks" in out
    assert "4 turns of abandoned branches removed" in out
    assert "history: ['system', 'user', 'assistant', 'tool']" in out


@pytest.mark.model
def test_memory_twice_in_one_folder(tmp_path: Path, child_env: dict[str, str]) -> None:
    first = run("agent_memory.py", str(tmp_path / "m"), env=child_env)
    assert "A new session" in first
    assert "has 3 turns now" in first
    second = run("agent_memory.py", str(tmp_path / "m"), env=child_env)
    assert "Found the session with 3 turns" in second
    assert second.count("disk") >= 1


@pytest.fixture
def folder(tmp_path: Path, engine: Any) -> Path:
    """The tiny engine's model as a folder."""
    model = tmp_path / "tiny"
    engine.model.save_pretrained(model)
    engine.text._tokenizer.save(str(model / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": engine.text._template}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def test_held_chunks(folder: Path, child_env: dict[str, str]) -> None:
    out = run("held_chunks.py", str(folder), env=child_env | {"CTXREUSE_CONFIG": os.devnull})
    answers = [line.partition(": ")[2] for line in out.splitlines() if line.startswith("  ")]
    assert len(answers) == 4
    assert answers[0::2] == answers[1::2]
    assert "tokens held once" in out


def test_documents(tmp_path: Path, folder: Path, child_env: dict[str, str]) -> None:
    env = child_env | {"CTXREUSE_CARDS": str(tmp_path / "cards"), "CTXREUSE_CONFIG": os.devnull}

    shuffled: Any = SimpleNamespace(**runpy.run_path(str(EXAMPLES.parent / "tests" / "runtime" / "shuffled.py")))
    ChunkShelf(tmp_path / "cards").add(shuffled.card(open_engine(str(folder))))
    out = run("documents.py", str(tmp_path / "two"), str(folder), env=env)
    assert out.count("gate: kl-0.020 by rotate") == 3
    assert out.count("gate: nothing to move") == 1
