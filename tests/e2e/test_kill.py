"""kill -9 at any moment: what was acknowledged is there, the store is sound, answers go on as if nothing happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.examples import scale
from support.waiting import patient

pytestmark = pytest.mark.slow


def test_sessions_survive_kills(tmp_path: Path) -> None:
    rounds = scale(200)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    env |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    launcher = Path(__file__).with_name("kill_launcher.py")
    done = subprocess.run(
        [sys.executable, str(launcher), str(tmp_path / "memory"), str(rounds), "20"],
        env=env,
        capture_output=True,
        text=True,
        timeout=patient(30 + rounds),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    # The kills must have hit work, and the checks must have had something to check.
    assert figures["rounds"] == rounds
    assert figures["acknowledged"] > rounds
    assert figures["continued"] > rounds // 2
    assert figures["cached"] > 0
    assert len(figures["killed_in"]) >= 4, figures
