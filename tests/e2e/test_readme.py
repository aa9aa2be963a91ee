"""What README shows runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^\$ (ctxreuse [^#\n]*?) *(?:#.*)?$", README, re.MULTILINE)


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_is_something_to_run() -> None:
    assert len(PROGRAMS) == 2
    assert len(COMMANDS) >= 5


@pytest.mark.model
@pytest.mark.parametrize("program", PROGRAMS, ids=["memory", "runtime"])
def test_programs(program: str, tmp_path: Path) -> None:
    """Twice, each time in a new process: the second one finds what the first one kept."""
    (tmp_path / "handbook.txt").write_text(
        "The observatory was founded by Ottilie Brandt. It has three telescopes.\n" * 9
    )
    run([sys.executable, "-c", program], tmp_path)
    assert "'disk'" in run([sys.executable, "-c", program], tmp_path)


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith(("ctxreuse bench", "ctxreuse model get"))])
def test_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxreuse_agents import Memory

    monkeypatch.setenv("CTXREUSE_STORE__PATH", str(tmp_path / "store"))
    with Memory.open() as memory:
        memory.create("here").user("hello")
    assert run([sys.executable, "-m", *command.split()], tmp_path)
