"""The sidecar as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxreuse.daemon.client import Client
from support.waiting import patient, until


class Sidecar:
    """``python -m ctxreuse_cloud serve`` with its store in ``folder``; ready when the constructor returns."""

    def __init__(self, folder: Path, flags: Sequence[str], env: dict[str, str]) -> None:
        self.ready_file = folder / "ready.json"
        self.ready_file.unlink(missing_ok=True)
        self.log = folder / "sidecar.log"
        command = [sys.executable, "-m", "ctxreuse_cloud", "serve", "--port", "0", "--bus", "tcp://127.0.0.1:0"]
        command += [
            "--store",
            str(folder / "store"),
            "--ready-file",
            str(self.ready_file),
            "--log-format",
            "json",
            *flags,
        ]
        paths = os.pathsep.join(entry for entry in sys.path if entry)
        names = {"PYTHONPATH": paths, "CTXREUSE_CONFIG": "", "XDG_CONFIG_HOME": str(folder)}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **names, **env})
        until(lambda: self.ready_file.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        found = json.loads(self.ready_file.read_text())
        self.url, self._certificate = found["url"], found["certificate"]
        self.bus = self.status()["bus"]["endpoint"]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = Client(self.url, certificate=self._certificate).call("GET", "/api/status")
        return found

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patient(30))

    def kill(self) -> None:
        """SIGKILL, as a power cut would."""
        self.process.kill()
        self.process.wait(patient(30))

    def lines(self) -> list[dict[str, Any]]:
        """Its log."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(patient(30))


class Edge:
    """``python -m ctxreuse_edge serve``, as a backend; ready when the constructor returns."""

    def __init__(self, folder: Path, model: Path, **more: str) -> None:
        store, log = folder / "edge", folder / "edge.log"
        command = [sys.executable, "-m", "ctxreuse_edge", "serve", "--port", "0", "--store", str(store)]
        env = {"CTXREUSE_CONFIG": "", "XDG_CONFIG_HOME": str(folder), "CTXREUSE_ENGINE__THREADS": "1"} | more
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [*command, "--model", str(model)], stdout=out, stderr=out, env={**os.environ, **env}
            )
        ready = store / "edge.json"
        until(lambda: ready.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, log.read_text()
        self.url = json.loads(ready.read_text())["url"]

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(patient(30))
