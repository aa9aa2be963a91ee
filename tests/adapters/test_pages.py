"""Programs of the adapters' pages run as they stand there, twice in one folder, each in a new process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import patient

PAGES = Path(__file__).parents[2] / "docs" / "guide" / "adapters"
PROGRAMS = [
    pytest.param(text, id=page.stem)
    for page in sorted(PAGES.glob("*.md"))
    for text in re.findall(r"^```python.*?\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs_and_runs_again(program: str, tmp_path: Path) -> None:
    assert len(program.splitlines()) <= 16
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            cwd=tmp_path,
            env=os.environ | {"CTXREUSE_CONFIG": os.devnull, "MEM0_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=patient(300),
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip()
