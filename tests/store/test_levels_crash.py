"""kill -9 while values are encoded smaller: what is left is whole, at the level that its record says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_forty_deaths_under_pressure(tmp_path: Path) -> None:
    launcher = Path(__file__).with_name("levels_launcher.py")
    words = [sys.executable, str(launcher), str(tmp_path / "store"), "40", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "kl-0.05" in json.loads(done.stdout)
