"""kill -9 at random moments: nothing that was acknowledged is lost, nothing that is left is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.examples import scale
from support.waiting import patient

pytestmark = pytest.mark.slow


def test_acknowledged_changes_survive_kills(tmp_path: Path) -> None:
    rounds = scale(200)
    launcher = Path(__file__).with_name("crash_launcher.py")
    words = [sys.executable, str(launcher), str(tmp_path / "store"), str(rounds), "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patient(rounds))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["turns"] > rounds / 2
