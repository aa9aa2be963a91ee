"""The examples run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctxreuse.engines import open_engine
from ctxreuse.reuse import ChunkProfileStore
from support.shuffled import card
from support.tiny_text import save_model
from support.waiting import patient

pytestmark = pytest.mark.daemon

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *args: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args], env=env, capture_output=True, text=True, timeout=patient(240)
    )
    assert done.returncode == 0, done.stderr
    assert len((EXAMPLES / name).read_text().splitlines()) < 80
    return done.stdout


def test_forks(child_env: dict[str, str]) -> None:
    out = run("agent_forks.py", env=child_env)
    assert "best branch: astar" in out
    assert "bfs: 2 turns of its own, 2 only in the trunk" in out
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
def folder(tmp_path: Path) -> Path:
    """The tiny engine's model as a folder."""
    return save_model(tmp_path / "tiny")


def test_in_place_attention(folder: Path, child_env: dict[str, str]) -> None:
    out = run("in_place_attention.py", str(folder), env=child_env | {"CTXREUSE_CONFIG": os.devnull})
    answers = [line.partition(": ")[2] for line in out.splitlines() if line.startswith("  ")]
    assert len(answers) == 4
    assert answers[0::2] == answers[1::2]
    assert "tokens stored once" in out


def test_documents(tmp_path: Path, folder: Path, child_env: dict[str, str]) -> None:
    env = child_env | {"CTXREUSE_CARDS": str(tmp_path / "cards"), "CTXREUSE_CONFIG": os.devnull}

    ChunkProfileStore(tmp_path / "cards").add(card(open_engine(str(folder))))
    out = run("documents.py", str(tmp_path / "two"), str(folder), env=env)
    assert out.count("gate: kl-0.020 by rotate") == 3
    assert out.count("gate: nothing to relocate") == 1


def test_generate_twice(tmp_path: Path, folder: Path, child_env: dict[str, str]) -> None:
    env = child_env | {"CTXREUSE_CONFIG": os.devnull}
    first = run("generate.py", str(tmp_path / "store"), str(folder), env=env)
    assert "reused {}" in first
    second = run("generate.py", str(tmp_path / "store"), str(folder), env=env)
    assert second.count("'disk'") == 2
