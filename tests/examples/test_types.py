"""The examples are checked against the installed packages from outside the repository, as a user's programs are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import patient

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Types of what the packages are built on are not looked at: that alone would take a minute and a gigabyte.
CONFIG = """[mypy]
strict = True
follow_imports = silent
[mypy-torch.*,transformers.*,tokenizers.*,safetensors.*,gguf.*,numba.*,cupy.*,lmdb.*,numpy.testing.*]
follow_imports = skip
ignore_missing_imports = True
"""


def mypy(folder: Path, *files: Path) -> str:
    (folder / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(folder / "cache"), *map(str, files)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=patient(300))
    return done.stdout + done.stderr


def test_examples_have_no_type_errors(tmp_path: Path) -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert f"no issues found in {len(files)} source files" in mypy(tmp_path, *files)


def test_a_wrong_use_of_the_library_is_found(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from ctxreuse import LLM, Memory\n"
        "llm = LLM('smollm2', max_kl='kl-0.01')\n"
        "llm.generate('x').usage.tokens.reused\n"
        "Memory.open('m').session('s').ask(3)\n"
        "Memory.open('m').session('s').ask('x', temprature=1.0)\n"
        "Memory.open('m').session('s').ask('x', temperature=1.0, stop=['.'])\n"
    )
    found = mypy(tmp_path, program)
    wrong = [line.partition(": error")[0] for line in found.splitlines() if ": error" in line]
    assert wrong == ["program.py:2", "program.py:3", "program.py:4", "program.py:5"], found
