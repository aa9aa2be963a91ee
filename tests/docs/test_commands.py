"""Commands that README and the docs show run as they stand there, from a fresh home folder."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main

from ctxreuse.lab.recorder import Recorder
from support.pages import PAGES, README, blocks, commands
from support.tiny_text import tiny_engine
from support.waiting import patient, until

CONSOLE = blocks("console")
#: Blocks that start daemons, or go on with what a command made, run as a whole; of the others each command by itself.
SETUPS = [(page, text) for page, text in CONSOLE if " serve" in text]
SEQUENCES = [(page, text) for page, text in CONSOLE if "store restore" in text]
SINGLE = [one for page, text in CONSOLE if (page, text) not in SETUPS + SEQUENCES for one in commands(text)]
# What takes minutes has tests of its own.
LONG = "make ", "python ", "ctxreuse calibrate"
PROGRAMS = {
    "ctxreuse": "ctxreuse.cli.app",
    "ctxreuse-edge": "ctxreuse_edge.cli",
    "ctxreuse-cloud": "ctxreuse_cloud.cli",
}


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose store served requests that were recorded, and a fresh home."""
    from ctxreuse_agents import Memory

    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("CTXREUSE_STORE__PATH", str(tmp_path / "store"))
    with Memory.open(engine=tiny_engine()) as memory, closing(Recorder(tmp_path / "traffic.jsonl")) as recorder:
        memory.runtime.recorder = recorder
        session = memory.create("here")
        session.user("hello " * 20)
        assert session.ask("Why?", max_tokens=2).text is not None
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("text", [text for _, text in SEQUENCES])
def test_a_sequence_runs(text: str, used: Path) -> None:
    for line in commands(text):
        test_a_command_runs(line, used)


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in dict.fromkeys(SINGLE) if not one.startswith(LONG)])
def test_a_command_runs(command: str, used: Path) -> None:
    program, *arguments = shlex.split(command)
    if "--generate" in arguments and "--requests" not in arguments:
        arguments += ["--requests", "100"]  # as it stands there it takes half a minute
    done = subprocess.run(
        [sys.executable, "-m", program.replace("-", "_"), *arguments],
        cwd=used,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def _options(program: str, arguments: list[str]) -> tuple[Any, list[str]]:
    """The command that ``arguments`` lead to, and what is left of them."""
    found: Any = typer.main.get_command(importlib.import_module(PROGRAMS[program]).app)
    while arguments and hasattr(found, "commands") and arguments[0] in found.commands:
        found, arguments = found.commands[arguments[0]], arguments[1:]
    return found, arguments


def test_every_command_that_is_named_exists_with_its_options() -> None:
    named = [one for page in PAGES for one in re.findall(r"`((?:ctxreuse(?:-edge|-cloud)?) [^`…]+)`", page.read_text())]
    named += [one for _, text in blocks("sh") for one in re.findall(r"^(ctxreuse[^#…\n]*)", text, re.MULTILINE)]
    named += [one for _, text in CONSOLE for one in commands(text) if one.startswith("ctxreuse")]
    assert len(named) > 20
    for line in named:
        program, *arguments = shlex.split(line.replace("[", "").replace("]", ""))
        command, rest = _options(program, arguments)
        assert not hasattr(command, "commands") or not rest or rest[0].startswith("-") or "|" in rest[0], line
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for one in rest:
            assert not one.startswith("--") or one.partition("=")[0] in known, f"{line}: no option {one}"


@pytest.mark.daemon
@pytest.mark.parametrize(("page", "text"), SETUPS, ids=[page for page, _ in SETUPS])
def test_a_setup_with_daemons_works(page: str, text: str, tmp_path: Path, model: Path) -> None:
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
        for line in commands(text.replace(":7353", f":{bus}")):
            program, *arguments = shlex.split(line)
            if program == "curl":
                place, flag, body = arguments
                assert (place.partition("/")[0], flag) == ("127.0.0.1:7351", "-d")
                if "cloud" in urls:
                    status = urls["edge"] + "/api/status"
                    until(
                        lambda status=status: httpx.get(status, timeout=patient(5)).json()["clouds"][0]["state"] == "up"
                    )
                answer = httpx.post(urls["edge"] + "/" + place.partition("/")[2], content=body, timeout=patient(60))
                continue
            command = [sys.executable, "-m", program.replace("-", "_"), *arguments]
            if "serve" not in arguments:
                done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
                assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
                continue
            name = program.removeprefix("ctxreuse-")
            with open(tmp_path / f"{name}.log", "wb") as log:
                daemon = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=log, stderr=log)
            stack.callback(_end, daemon)
            urls[name] = _address(daemon, tmp_path, name)
        assert answer is not None
        assert answer.status_code == 200, answer.text
        assert 1 <= answer.json()["usage"]["completion_tokens"] <= 8
        known = "".join(one.read_text("utf-8") for one in (README, README.parent / "docs" / "guide" / "edge.md"))
        for source in answer.json()["usage"]["prompt_tokens_details"]["sources"]:
            assert f"`{source}`" in known


def _address(daemon: subprocess.Popen[bytes], folder: Path, name: str) -> str:
    until(lambda: daemon.poll() is not None or list(folder.rglob(f"{name}.json")), 120)
    assert daemon.poll() is None, (folder / f"{name}.log").read_text()
    return str(json.loads(next(folder.rglob(f"{name}.json")).read_text())["url"])


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(patient(60)) == 0
