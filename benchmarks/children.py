"""Processes that a bench starts beside itself: a cloud over a store, and others that obey their standard input."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ctxreuse.errors import EngineError
from ctxreuse.peer.serve.service import ServeOptions

__all__ = ["Child", "main", "relay", "sidecar", "wait_or_kill"]


def wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> None:
    """Wait for the end of a process that was told to end, and kill it after so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Child:
    """A Python process that says where it listens in its first line and ends when its standard input does.

    ``seconds`` of CPU and ``memory`` in bytes are as the system sees them. Close it, or use it in a ``with``.
    """

    def __init__(self, module: str, *arguments: object) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._seen = psutil.Process(self._process.pid)
        self.said = self._process.stdout.readline().strip()
        if not self.said:
            self.close()
            raise EngineError("a process of the bench did not start", where=module)

    def order(self, line: str) -> None:
        """Write one line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    @property
    def seconds(self) -> float:
        """CPU seconds that it has used."""
        times = self._seen.cpu_times()
        return float(times.user + times.system)

    @property
    def memory(self) -> int:
        """Bytes of memory that are its own. Where the system says so (Linux) without pages of files: those of a store
        that it has mapped count as its own elsewhere, although the system takes them back when it likes."""
        try:
            lines = Path(f"/proc/{self._process.pid}/status").read_text("utf-8").splitlines()
        except OSError:
            return int(self._seen.memory_full_info().uss)
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

    def close(self) -> None:
        """End its input, wait for its end, and kill it after ten seconds. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        wait_or_kill(self._process, 10)
        self._process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sidecar(folder: Path, *, capacity: int = 8_000_000_000) -> Child:
    """A cloud with its store in ``folder``; ``said`` is its endpoint. Every peer is the one tenant ``local``."""
    return Child("benchmarks.children", folder, capacity)


def relay(endpoint: str, rate: float, rtt: float) -> Child:
    """A link to ``endpoint`` of ``rate`` bytes/s and ``rtt`` seconds; ``said`` is its port."""
    arguments = ("127.0.0.1:0", endpoint.removeprefix("tcp://"), "--rate", f"{rate:.0f}B/s", "--rtt", f"{rtt * 1e3}ms")
    return Child("examples.demo.relay", *arguments)


def main(arguments: Sequence[str]) -> None:
    """Bus server and store service over the folder and capacity given; prints its endpoint, ends with its input."""
    from ctxreuse.bus.transport import BusServer
    from ctxreuse.peer.serve.encoder import BlockEncoder
    from ctxreuse.peer.serve.service import StoreService
    from ctxreuse.store import open_store

    folder = Path(arguments[0])
    with open_store(folder / "store", capacity=int(arguments[1])) as store:
        encoder = BlockEncoder(kept=0)  # every fetch pays for its encoding
        service = StoreService(store, folder, ServeOptions(tenant_of=lambda _: "local", encoder=encoder))
        with BusServer(service) as server:
            print(server.endpoint, flush=True)
            sys.stdin.read()
        service.close()
        encoder.close()


if __name__ == "__main__":
    main(sys.argv[1:])
