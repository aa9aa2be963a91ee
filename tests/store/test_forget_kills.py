"""kill -9 while sessions are deleted and files rewritten: afterwards one is wholly there, or gone from every file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.examples import scale
from support.waiting import patient

#: Kills of the nightly profile, and of others.
_KILLS, _FEW = 200, 15


def test_deletions_survive_kills(tmp_path: Path) -> None:
    rounds = _KILLS if scale(_KILLS) >= _KILLS else _FEW
    launcher = Path(__file__).with_name("forget_launcher.py")
    words = [sys.executable, str(launcher), str(tmp_path / "store"), str(rounds), "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=patient(20 + 3 * rounds))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gone"] >= rounds
