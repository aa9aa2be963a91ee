"""kill -9 while values are encoded smaller: what is left is whole, at the level that its record says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.examples import scale
from support.waiting import patient

pytestmark = pytest.mark.slow


def test_kills_while_values_are_encoded_smaller_leave_whole_values(tmp_path: Path) -> None:
    rounds = scale(40)
    launcher = Path(__file__).with_name("levels_launcher.py")
    words = [sys.executable, str(launcher), str(tmp_path / "store"), str(rounds), "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patient(5 * rounds))
    assert done.returncode == 0, done.stderr
    assert "kl-0.05" in json.loads(done.stdout)
