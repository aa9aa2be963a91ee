"""Sidecars that a bench starts as processes in front of its backends, ours and another's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
import psutil

from benchmarks.children import wait_or_kill
from benchmarks.vllm_server import free_port
from ctxreuse.errors import EngineError

__all__ = ["ContextPilot", "Proxied", "Sidecar", "VllmRouter"]

_WAIT = 60.0


class Proxied:
    """A process in front of backends, at ``url``. Close it, or use it in a ``with``."""

    url: str

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        with open(log, "wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | env)
        self._log, self._seen = log, psutil.Process(self._process.pid)

    @property
    def seconds(self) -> float:
        """CPU seconds that it has used."""
        times = self._seen.cpu_times()
        return float(times.user + times.system)

    def ended(self, until: float) -> bool:
        """Return False while it may still come up. Raises EngineError with its last words if it cannot."""
        if self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
            return False
        self.close()
        said = self._log.read_text("utf-8", "replace")
        raise EngineError("a sidecar did not come up", where=str(self._log), fix=said[-300:])

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        wait_or_kill(self._process, 10)

    def __enter__(self) -> Proxied:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sidecar(Proxied):
    """``ctxreuse-cloud serve`` with nothing but a proxy to do; ``folder`` must not exist. Raises EngineError."""

    def __init__(self, folder: Path, backends: Sequence[str], settings: Mapping[str, str] | None = None) -> None:
        """``settings``: further ones, as variables of the environment."""
        folder.mkdir()
        ready = folder / "ready.json"
        command = [sys.executable, "-m", "ctxreuse_cloud", "serve", "--port", "0", "--bus", "tcp://127.0.0.1:0"]
        command += ["--workers", "0", "--store", str(folder / "store"), "--ready-file", str(ready)]
        for backend in backends:
            command += ["--backend", backend]
        super().__init__(
            command, folder / "log", {"CTXREUSE_CONFIG": "", "CTXREUSE_CLOUD__TENANT_REQUESTS": "0", **(settings or {})}
        )
        until = time.monotonic() + _WAIT
        while not ready.exists():
            self.ended(until)
        self.url = str(msgspec.json.decode(ready.read_bytes())["url"])


class _Other(Proxied):
    """Another's program, which answers ``path`` when it is up. Raises EngineError."""

    def __init__(self, command: Sequence[str], port: int, log: Path, path: str = "/health") -> None:
        super().__init__(command, log, {"PYTHONPATH": ""})
        self._path = path
        self.url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + _WAIT
        while not self._answers():
            self.ended(until)

    def _answers(self) -> bool:
        try:
            with urlopen(self.url + self._path, timeout=1) as found:
                return bool(found.status == 200)
        except (URLError, OSError):
            return False


class VllmRouter(_Other):
    """The program vllm-router beside a Python that was given as ``CTXREUSE_PEERS``. Raises EngineError."""

    def __init__(self, python: str, log: Path, backends: Sequence[str], policy: str = "cache_aware") -> None:
        port = free_port()
        command = [str(self.program(python)), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        super().__init__([*command, "--policy", policy, "--worker-urls", *backends], port, log)

    @staticmethod
    def program(python: str) -> Path:
        """Return where it would be."""
        return Path(python).with_name("vllm-router")


class ContextPilot(_Other):
    """ContextPilot's proxy in front of one backend, in a Python that has it. Raises EngineError."""

    def __init__(self, python: str, log: Path, backend: str) -> None:
        port = free_port()
        command = [python, "-m", "contextpilot.server.http_server", "--host", "127.0.0.1", "--port", str(port)]
        super().__init__([*command, "--infer-api-url", backend, "--log-level", "error"], port, log, "/")

    @staticmethod
    def there(python: str) -> bool:
        """Return True if that Python has it."""
        code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('contextpilot') is None)"
        return subprocess.run([python, "-c", code], check=False).returncode == 0
