"""kill -9 at random moments: nothing that was acknowledged is lost, nothing that is left is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_two_hundred_deaths(tmp_path: Path) -> None:
    launcher = Path(__file__).with_name("crash_launcher.py")
    words = [sys.executable, str(launcher), str(tmp_path / "store"), "200", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["turns"] > 100
