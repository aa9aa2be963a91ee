"""What README shows runs as it stands there."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest
from cluster import until

from ctxreuse.lab.recorder import Recorder

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^\$ (ctxreuse [^#\n]*?) *(?:#.*)?$", README, re.MULTILINE)
BLOCKS = re.findall(r"^```console\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
TINY = runpy.run_path(str(Path(__file__).parents[1] / "agents" / "tiny_engine.py"))
#: The block that sets up a cloud and a device with keys.
LINK = next(block for block in BLOCKS if "keys allow" in block)
COMMANDS = [command for command in COMMANDS if command not in LINK]


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_is_something_to_run() -> None:
    assert len(PROGRAMS) == 2
    assert len(COMMANDS) >= 5


@pytest.mark.model
@pytest.mark.parametrize("program", PROGRAMS, ids=["memory", "runtime"])
def test_programs(program: str, tmp_path: Path) -> None:
    """Twice, each time in a new process: the second one finds what the first one kept."""
    (tmp_path / "handbook.txt").write_text(
        "The observatory was founded by Ottilie Brandt. It has three telescopes.\n" * 9
    )
    run([sys.executable, "-c", program], tmp_path)
    assert "'disk'" in run([sys.executable, "-c", program], tmp_path)


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose store served requests that were recorded."""
    from ctxreuse_agents import Memory

    monkeypatch.setenv("CTXREUSE_STORE__PATH", str(tmp_path / "store"))
    with Memory.open(engine=TINY["tiny_engine"]()) as memory, closing(Recorder(tmp_path / "traffic.jsonl")) as recorder:
        memory.runtime.recorder = recorder
        session = memory.create("here")
        session.user("hello " * 20)
        assert session.ask("Why?", max_tokens=2).text is not None
    return tmp_path


# What takes minutes has tests of its own.
LONG = "ctxreuse bench", "ctxreuse calibrate", "ctxreuse model get"


@pytest.mark.parametrize("command", [command for command in dict.fromkeys(COMMANDS) if not command.startswith(LONG)])
def test_commands(command: str, used: Path) -> None:
    assert run([sys.executable, "-m", *command.split()], used)


def test_a_cloud_and_a_device_with_keys(tmp_path: Path, model: Path) -> None:
    """The commands one after another; the daemons in the background, as in terminals of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        bus = str(free.getsockname()[1])
    env = {name: value for name, value in os.environ.items() if not name.startswith("CTXREUSE_")}
    env |= {name: str(tmp_path) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    env |= {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "CTXREUSE_ENGINE__MODEL": str(model)}
    env |= {"CTXREUSE_CLOUD__PORT": "0", "CTXREUSE_EDGE__PORT": "0", "CTXREUSE_BUS__BIND": f"tcp://127.0.0.1:{bus}"}
    urls: dict[str, str] = {}
    answer = None
    with ExitStack() as stack:
        for line in re.findall(r"^\$ (.*?) *(?:#.*)?$", LINK.replace(":7353", f":{bus}"), re.MULTILINE):
            program, *arguments = shlex.split(line)
            if program == "curl":
                place, flag, body = arguments
                assert (place.partition("/")[0], flag) == ("127.0.0.1:7351", "-d")
                until(lambda: httpx.get(urls["edge"] + "/api/status").json()["clouds"][0]["state"] == "up")
                answer = httpx.post(urls["edge"] + "/" + place.partition("/")[2], content=body, timeout=60)
                continue
            command = [sys.executable, "-m", program.replace("-", "_"), *arguments]
            if "serve" not in arguments:
                subprocess.run(command, env=env, cwd=tmp_path, check=True, capture_output=True)
                continue
            name = program.removeprefix("ctxreuse-")
            with open(tmp_path / f"{name}.log", "wb") as log:
                daemon = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=log, stderr=log)
            stack.callback(_end, daemon)
            urls[name] = _address(daemon, tmp_path, name)
        assert answer is not None
        assert answer.status_code == 200, answer.text
        assert 1 <= answer.json()["usage"]["completion_tokens"] <= 8
        sources = answer.json()["usage"]["prompt_tokens_details"]["sources"]
        for source in sources:
            assert f"`{source}`" in README


def _address(daemon: subprocess.Popen[bytes], folder: Path, name: str) -> str:
    until(lambda: daemon.poll() is not None or list(folder.rglob(f"{name}.json")), 120)
    assert daemon.poll() is None, (folder / f"{name}.log").read_text()
    return str(json.loads(next(folder.rglob(f"{name}.json")).read_text())["url"])


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(60) == 0
