"""The first commands of the documentation, as processes in a fresh home: keys, a cloud, a device, status and doctor."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.tiny_text import save_model
from support.waiting import patient, until

pytestmark = pytest.mark.slow

PROMPT = {"messages": [{"role": "user", "content": "The lamp turns once a minute. " * 40}], "max_tokens": 4}


class Home:
    """A fresh home folder, and commands run in it as a user would."""

    def __init__(self, home: Path, model: Path) -> None:
        self.path, self.work = home, home / "work"
        (self.work / "cloud").mkdir(parents=True)  # a folder of that name, as in a checkout, is no key
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("CTXREUSE_", "XDG_"))}
        self.env = kept | {
            "HOME": str(home),
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            "COLUMNS": "250",
            "OMP_NUM_THREADS": "1",
            "CTXREUSE_ENGINE__MODEL": str(model),
            "CTXREUSE_ENGINE__THREADS": "1",
            "CTXREUSE_CLOUD__PREFILL_WORKERS": "0",
            "CTXREUSE_CLOUD__HEALTH": "0.2s",
            "CTXREUSE_CLOUD__PORT": str(free_port()),
            "CTXREUSE_BUS__BIND": f"tcp://127.0.0.1:{free_port()}",
            "CTXREUSE_EDGE__PORT": str(free_port()),
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def run(self, line: str, code: int = 0) -> str:
        """Run a command to its end; returns what it printed."""
        done = subprocess.run(
            command(line), cwd=self.work, env=self.env, capture_output=True, text=True, timeout=patient(120)
        )
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == code, f"{line}: {done.returncode} {said}"
        assert "Traceback" not in said
        return said

    def serve(self, line: str, ready: Path) -> subprocess.Popen[bytes]:
        """Start a daemon and wait for its address file."""
        log = self.path / f"{len(self.started)}.log"
        with open(log, "wb") as out:
            child = subprocess.Popen(command(line), cwd=self.work, env=self.env, stdout=out, stderr=out)
        self.started.append(child)
        until(lambda: ready.exists() or child.poll() is not None, 60)
        assert child.poll() is None, log.read_text()
        return child


def command(line: str) -> list[str]:
    program, *arguments = line.split()
    return [sys.executable, "-m", program.replace("-", "_"), *arguments]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    found = Home(tmp_path, save_model(tmp_path / "models" / "tiny", positions=4096))
    yield found
    for child in found.started:
        child.kill()
        child.wait()


def test_a_cloud_and_a_device_from_nothing(home: Home) -> None:
    assert "ctxreuse-cloud serve" in home.run("ctxreuse-cloud status", 3)
    assert "ctxreuse-edge serve" in home.run("ctxreuse-edge status", 3)

    home.run("ctxreuse keys new cloud")
    home.run("ctxreuse keys new laptop")
    home.run("ctxreuse keys allow laptop --tenant me")
    data = home.path / ".local" / "share" / "ctxreuse"
    url = f"http://127.0.0.1:{home.env['CTXREUSE_EDGE__PORT']}"
    cloud = home.serve(f"ctxreuse-cloud serve --bus-key cloud --backend {url}", data / "cloud" / "cloud.json")
    assert "unhealthy" in home.run("ctxreuse-cloud status")

    bus, traffic = home.env["CTXREUSE_BUS__BIND"], home.path / "traffic.jsonl"
    store = home.path / "elsewhere"
    edge = f"ctxreuse-edge serve --bus-key laptop --cloud {bus} --cloud-key cloud --record {traffic} --store {store}"
    home.serve(edge, store / "edge.json")
    with httpx.Client(base_url=url, timeout=patient(60)) as http:
        until(lambda: http.get("/api/status").json()["clouds"][0]["state"] == "up")
        for _ in range(2):
            assert http.post("/v1/chat/completions", json=PROMPT).status_code == 200

    said = home.run("ctxreuse-edge sync")
    assert re.search(r"[1-9]\d* blocks .* sent since the start, 0 \(0B\) pending", said), said
    said = home.run("ctxreuse-edge status")
    assert ": up" in said
    assert str(store) in said
    until(lambda: " healthy" in home.run("ctxreuse-cloud status"), 30)
    assert "laptop of me" in home.run("ctxreuse-cloud status")
    assert "closed" in home.run("ctxreuse-cloud doctor")

    found = findings(home.run("ctxreuse-edge doctor --json"))
    assert found["store", "folder"]["value"] == str(store)
    assert found["daemon", bus]["status"] == "ok"
    assert findings(home.run("ctxreuse doctor --json"))["store", "folder"]["value"] == str(store)

    # Of the running daemon, and of the stopped one.
    until((store / "cost.bin").exists, 30)
    for _ in range(2):
        priced = json.loads(home.run(f"ctxreuse replay {traffic} --cost {store} --policy lru --json"))["priced"]
        assert priced == "prices of elsewhere"
        home.started[1].send_signal(signal.SIGTERM)
        assert home.started[1].wait(patient(60)) == 0

    home.serve(edge, store / "edge.json")
    cloud.send_signal(signal.SIGTERM)
    assert cloud.wait(patient(60)) == 0
    with httpx.Client(base_url=url, timeout=patient(60)) as http:
        until(lambda: http.get("/api/status").json()["clouds"][0]["state"] == "down", 30)
    assert findings(home.run("ctxreuse-edge doctor --json"))["daemon", bus]["status"] == "missing"


def findings(said: str) -> dict[tuple[str, str], Any]:
    return {(one["area"], one["name"]): one for one in json.loads(said)["findings"]}


def test_why_without_requests_says_what_to_do(home: Home) -> None:
    said = home.run("ctxreuse why --last", 3)
    assert "no request is remembered" in said
    assert "`ctxreuse why --last`" not in said
    assert "Send a request" in said


def test_a_recording_is_priced_by_the_daemon_of_the_settings(home: Home) -> None:
    """The daemon still runs, and has no cloud."""
    store, traffic = home.path / ".local" / "share" / "ctxreuse" / "store", home.path / "traffic.jsonl"
    home.serve(f"ctxreuse-edge serve --record {traffic}", store / "edge.json")
    url = f"http://127.0.0.1:{home.env['CTXREUSE_EDGE__PORT']}"
    for _ in range(2):
        assert httpx.post(f"{url}/v1/chat/completions", json=PROMPT, timeout=patient(60)).status_code == 200
    until((store / "cost.bin").exists, 30)
    said = json.loads(home.run(f"ctxreuse replay {traffic} --policy lru --json"))
    assert said["priced"] == "prices as this device measured them"
