"""A tiny model's folder, and daemons on it: in this process for the API, as real processes for what kills them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ctxreuse_edge.app import address_file, application
from ctxreuse_edge.node import EdgeNode

from benchmarks.chromium import INSTALL, chromium
from ctxreuse.config import Settings, load
from ctxreuse.daemon.lifecycle import Daemon, read_address
from support.tiny_text import save_model
from support.waiting import patient, until

_left_out: list[str] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("browser") is not None]
    if marked and chromium() is None and os.environ.get("CTXREUSE_REQUIRE_CHROMIUM") != "1":
        config.hook.pytest_deselected(items=marked)
        _left_out.extend(item.nodeid for item in marked)
        items[:] = [item for item in items if item not in marked]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        said = f"{len(_left_out)} tests of the page in a browser did not run; to run them: {INSTALL}"
        terminalreporter.write_line(said, yellow=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the tiny model."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny", positions=4096)


@pytest.fixture(scope="session")
def engine(folder: Path) -> Any:
    from ctxreuse.engines import open_engine

    return open_engine(str(folder))


class Served:
    """A daemon in a thread of this process."""

    def __init__(self, settings: Settings, engine: Any) -> None:
        self.node = EdgeNode(settings)
        self.daemon = Daemon("edge", drain=settings.edge.drain, address_file=address_file(settings))
        self.settings, self.code = settings, -1
        app = application(self.node, self.daemon)
        self.url = self.daemon.bind()
        self._failed: BaseException | None = None

        def run() -> None:
            try:
                self.code = self.daemon.run(app, lambda: self.node.opened(engine))
            except BaseException as error:
                self._failed = error

        self.thread = threading.Thread(target=run)
        self.thread.start()
        until(lambda: not self.daemon.not_ready() or not self.thread.is_alive())
        if self._failed is not None:
            raise self._failed
        self.http = httpx.Client(base_url=self.url, timeout=patient(60))

    def close(self) -> None:
        self.daemon.stop()
        self.thread.join(patient(30))
        self.http.close()
        assert not self.thread.is_alive()


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path, folder: Path, engine: Any) -> Iterator[Serve]:
    """serve(**{"edge.drain": 1}) starts a daemon in a thread, ended with the test."""
    with contextlib.ExitStack() as stack:

        def start(engine: Any = engine, **flags: Any) -> Served:
            known = {"store.path": str(tmp_path / "store"), "engine.model": str(folder), **flags}
            served = Served(load(env={"CTXREUSE_CONFIG": os.devnull}, flags=known).settings, engine)
            stack.callback(served.close)
            return served

        yield start


@pytest.fixture
def edge(serve: Serve) -> Served:
    return serve()


class Process:
    """A daemon as a process of its own."""

    def __init__(self, store: Path, folder: Path, *args: str, env: dict[str, str]) -> None:
        self.store = store
        command = [sys.executable, "-m", "ctxreuse_edge", "serve", "--store", str(store), "--model", str(folder)]
        self.child = subprocess.Popen(
            [*command, "--port", "0", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )

    def ready(self) -> httpx.Client:
        def address() -> Any:
            assert self.child.poll() is None, self.child.communicate()[1]
            found = read_address(self.store / "edge.json")
            return found if found is not None and found.pid == self.child.pid else None

        self.url = str(until(address, 60).url)
        return httpx.Client(base_url=self.url, timeout=patient(60))

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        if self.child.poll() is None:
            self.child.send_signal(number)
        out, err = self.child.communicate(timeout=patient(60))
        return self.child.returncode, out, err


@pytest.fixture
def process(tmp_path: Path, folder: Path) -> Iterator[Callable[..., Process]]:
    """process(*args, **environment) starts a daemon, killed with the test if it still runs."""
    started: list[Process] = []
    env = {name: value for name, value in os.environ.items() if not name.startswith("CTXREUSE_")}
    env |= {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "HOME": str(tmp_path)}
    env |= {"XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "CTXREUSE_ENGINE__THREADS": "1"}

    def start(*args: str, **more: str) -> Process:
        started.append(Process(tmp_path / "store", folder, *args, env=env | more))
        return started[-1]

    yield start
    for one in started:
        if one.child.poll() is None:
            one.end(signal.SIGKILL)
