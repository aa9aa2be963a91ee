"""Programs that README and the docs show run as they stand there, each in a new process and a fresh home folder."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import blocks

PROGRAMS = blocks("python")
SKETCHES = blocks("py")


def run(program: str, folder: Path) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh home; the models of this user's cache stay where they are, they are large."""
    from ctxreuse.models import cache

    monkeypatch.setenv("CTXREUSE_MODELS", str(cache.root()))
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    lines = "The observatory was founded by Ottilie Brandt. It has three telescopes.\n" * 9
    (tmp_path / "handbook.txt").write_text(lines)
    return tmp_path


@pytest.mark.model
@pytest.mark.parametrize(("page", "program"), PROGRAMS)
def test_a_program_runs_and_its_second_run_reuses_the_first(
    page: str, program: str, home: Path, request: pytest.FixtureRequest
) -> None:
    if "max_kl" in program:
        from ctxreuse.codec import ProfileStore

        ProfileStore().add(request.getfixturevalue("smollm2_card"))
    run(program, home)
    again = run(program, home)
    if "by_source" in program:
        assert "'disk'" in again


@pytest.mark.parametrize(("page", "sketch"), SKETCHES)
def test_what_a_sketch_imports_is_there(page: str, sketch: str) -> None:
    tree = ast.parse(sketch)
    wanted = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert wanted
    exec(compile(ast.Module(wanted, []), page, "exec"), {})
