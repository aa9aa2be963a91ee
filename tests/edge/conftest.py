"""A tiny model's folder, and daemons on it: in this process for the API, as real processes for what kills them."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ctxreuse_edge.app import address_file, application, opened
from ctxreuse_edge.node import Node

from ctxreuse.config import Settings, load
from ctxreuse.daemon.life import Daemon, read_address

TINY = runpy.run_path(str(Path(__file__).parents[1] / "agents" / "tiny_engine.py"))


def poll(done: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Poll until ``done()`` is true and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := done():
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds} s")


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """until(condition, seconds=30) polls, and returns what is true at last."""
    return poll


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A model of two layers gains nothing from a thread pool, and loses much if the machine is busy."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the tiny model."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    TINY["tiny_model"](positions=4096).save_pretrained(place)
    TINY["tiny_text"]()._tokenizer.save(str(place / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TINY["CHATML"]}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


@pytest.fixture(scope="session")
def engine(folder: Path) -> Any:
    from ctxreuse.engines import open_engine

    return open_engine(str(folder))


class Served:
    """A daemon in a thread of this process."""

    def __init__(self, settings: Settings, engine: Any) -> None:
        self.node = Node()
        self.daemon = Daemon("edge", drain=settings.edge.drain, address_file=address_file(settings))
        self.settings, self.code = settings, -1
        app = application(settings, self.daemon, self.node)
        self.url = self.daemon.bind()
        self._failed: BaseException | None = None

        def run() -> None:
            try:
                self.code = self.daemon.run(app, lambda: opened(settings, self.node, engine))
            except BaseException as error:
                self._failed = error

        self.thread = threading.Thread(target=run)
        self.thread.start()
        poll(lambda: not self.daemon.not_ready() or not self.thread.is_alive())
        if self._failed is not None:
            raise self._failed
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def close(self) -> None:
        self.daemon.stop()
        self.thread.join(30)
        self.http.close()
        assert not self.thread.is_alive()


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path, folder: Path, engine: Any) -> Iterator[Serve]:
    """serve(**{"edge.drain": 1}) starts a daemon in a thread, ended with the test."""
    with contextlib.ExitStack() as stack:

        def start(**flags: Any) -> Served:
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

        self.url = str(poll(address, 60).url)
        return httpx.Client(base_url=self.url, timeout=60)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        if self.child.poll() is None:
            self.child.send_signal(number)
        out, err = self.child.communicate(timeout=60)
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
