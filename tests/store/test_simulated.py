"""Numbered schedules of disk faults under a store: see `support.simulator.store`."""

from __future__ import annotations

import os
import subprocess
import sys

from support.examples import scale
from support.waiting import patient


def test_schedules() -> None:
    """In a process of one thread, as each schedule forks."""
    count = scale(240) if scale(100) < 100 else 5_000
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run(
        [sys.executable, "-m", "support.simulator", "store", "--count", str(count)],
        env=env,
        capture_output=True,
        text=True,
        timeout=patient(30 + count / 4),
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-4000:]
    for kind in ("put", "commit", "panic", "full", "die before", "die after"):
        assert f"'{kind}'" in done.stdout, done.stdout
