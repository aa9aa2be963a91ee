"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
