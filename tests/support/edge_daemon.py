"""An edge daemon as a process, on the tiny engine's model, for what is attached to one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ctxreuse.daemon.lifecycle import read_address
from support.waiting import until

__all__ = ["Daemon"]


class Daemon:
    """A real edge daemon with its store in ``folder``, which can be killed and started again."""

    def __init__(self, folder: Path, model: Path, env: Mapping[str, str], *, port: int = 0) -> None:
        self.store, self.model, self.port = folder / "daemon", model, port
        self.env = {name: value for name, value in env.items() if not name.startswith("CTXREUSE_")}
        self.env |= {"CTXREUSE_CONFIG": os.devnull, "CTXREUSE_ENGINE__THREADS": "1"}
        self.child: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        command = [sys.executable, "-m", "ctxreuse_edge", "serve", "--port", str(self.port)]
        command += ["--store", str(self.store), "--model", str(self.model), "--log-level", "error"]
        self.child = subprocess.Popen(command, env=self.env, stdout=subprocess.DEVNULL)
        child = self.child

        def address() -> str | None:
            assert child.poll() is None, "the daemon did not start"
            found = read_address(self.store / "edge.json")
            return found.url if found is not None and found.pid == child.pid else None

        return until(address, 60) or ""

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child = None
