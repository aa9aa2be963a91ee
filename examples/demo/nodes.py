"""The daemons of the demo: a cloud and edges as processes, each with its own settings, key and store in one folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ctxreuse.bus.auth.allowlist import Allowed, AllowList
from ctxreuse.bus.auth.curve import KeyPair
from ctxreuse.daemon.client import Client
from ctxreuse.daemon.lifecycle import read_address
from ctxreuse.errors import CtxReuseError, LinkDownError
from demo.acts import engine_name
from demo.relay import Relay

__all__ = ["Node", "Place", "unbroken", "wait_for"]

_STARTING, _STOPPING = 180.0, 20.0
_LOG_LINES = 12


def wait_for(true: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Poll until ``true()`` and return it. Raises LinkDownError after ``seconds``."""
    end = time.monotonic() + seconds
    while not (found := true()):
        if time.monotonic() > end:
            raise LinkDownError(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Signals wait until this ends, so that every started process is known and ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: pending.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, act in before.items():
            signal.signal(number, act)
        if pending:
            signal.raise_signal(pending[0])


class Node:
    """One daemon as a process; its output goes to ``NAME.log`` in ``folder``. Close it, or use it in a ``with``.

    ``settings`` are written as its TOML file, by section. Call `ready` before anything else.
    """

    def __init__(self, folder: Path, name: str, face: Literal["cloud", "edge"], settings: dict[str, Any]) -> None:
        self.name, self.store = name, folder / name
        self._log = folder / f"{name}.log"
        file = folder / f"{name}.toml"
        file.write_text("\n".join(_section(title, values) for title, values in settings.items()), "utf-8")
        self._address = self.store / f"{face}.json"
        command = [sys.executable, "-P", "-m", f"ctxreuse_{face}", "--config", str(file), "serve"]
        # The demo's nodes ignore the user's settings, except for the folder of profiles.
        env = {k: v for k, v in os.environ.items() if not k.startswith("CTXREUSE_") or k == "CTXREUSE_CARDS"}
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        self._client: Client | None = None

    def ready(self) -> Node:
        """Wait until it serves. Raises LinkDownError with the end of its log if it ended instead."""

        def address() -> str:
            if self._process.poll() is not None:
                raise self.failed()
            found = read_address(self._address)
            return found.url if found is not None and found.pid == self._process.pid else ""

        self._client = Client(wait_for(address, f"the start of {self.name}", _STARTING))
        return self

    @property
    def url(self) -> str:
        """Where it serves HTTP."""
        assert self._client is not None, "ready() comes first"
        return self._client.url

    def call(self, method: str, path: str) -> Any:
        """Call it over HTTP. Raises LinkDownError with the end of its log if it has ended."""
        assert self._client is not None, "ready() comes first"
        try:
            return self._client.call(method, path)
        except CtxReuseError:
            if self._process.poll() is not None:
                raise self.failed() from None
            raise

    def failed(self) -> LinkDownError:
        """Return the error for a daemon that failed."""
        lines = self._log.read_text("utf-8", errors="replace").strip().splitlines()[-_LOG_LINES:]
        state = "runs" if self._process.poll() is None else f"ended with {self._process.returncode}"
        return LinkDownError(f"{self.name} {state}; its log ends with:\n" + "\n".join(lines), where=self.name)

    def close(self) -> None:
        """End it as a service manager does; kill it if it takes too long. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOPPING)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Place:
    """A folder in which nodes are made: knows their keys, and who may connect to the cloud."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._allowed = AllowList(folder / "allow.toml")
        self._cloud_key = self._key("cloud")

    def cloud(self) -> Node:
        """Start the cloud: it keeps contexts and computes nothing."""
        bus = {"bind": "tcp://127.0.0.1:0", "key_file": self._file("cloud"), "allow_file": str(self._allowed.path)}
        cloud = {"port": 0, "store": str(self.folder / "cloud"), "prefill_workers": 0, "drain": "5s"}
        return Node(self.folder, "cloud", "cloud", {"bus": bus, "cloud": cloud})

    def edge(self, name: str, link: Relay, *, allowed: bool = True) -> Node:
        """Start an edge whose cloud is behind ``link``; the cloud knows its key if ``allowed``."""
        public = self._key(name)
        if allowed:
            self._allowed.allow(Allowed(name, public, "home", datetime.now(UTC)))
        cloud = {"endpoint": link.endpoint, "server_key": self._cloud_key.hex(), "name": "cloud"}
        settings = {
            "store": {"path": str(self.folder / name)},
            "engine": {"engine": engine_name()},
            "edge": {"port": 0, "drain": "5s"},
            "bus": {"key_file": self._file(name), "clouds": [cloud]},
        }
        return Node(self.folder, name, "edge", settings)

    def device(self, name: str) -> tuple[str, str]:
        """A device that is no daemon: the file of its key, and the cloud's public key as hex."""
        self._allowed.allow(Allowed(name, self._key(name), "home", datetime.now(UTC)))
        return self._file(name), self._cloud_key.hex()

    def _file(self, name: str) -> str:
        return str(self.folder / f"{name}.key")

    def _key(self, name: str) -> bytes:
        pair = KeyPair.new()
        pair.write(self._file(name))
        return pair.public


def _section(title: str, values: dict[str, Any]) -> str:
    return f"[{title}]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
