"""Real clients run an agent with two tools over three turns against a real daemon on SmolLM2: `make test-clients`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.waiting import patient, until

pytestmark = [pytest.mark.clients, pytest.mark.model, pytest.mark.daemon]

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clients").glob("*.*"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("daemon")
    words = ["serve", "--model", "smollm2", "--port", "0", "--store", str(folder / "store")]
    env = os.environ | {"CTXREUSE_CONFIG": "", "XDG_CONFIG_HOME": str(folder)}
    with open(folder / "log", "w") as log:
        daemon = subprocess.Popen([sys.executable, "-m", "ctxreuse_edge", *words], env=env, stdout=log, stderr=log)
    try:
        ready = folder / "store" / "edge.json"
        until(lambda: ready.exists() or daemon.poll() is not None, 300)
        assert daemon.poll() is None, (folder / "log").read_text()
        yield json.loads(ready.read_text())["url"]
    finally:
        daemon.terminate()
        daemon.wait(patient(60))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_agent_calls_tools_and_its_prompt_is_reused(url: str, example: Path) -> None:
    place = Path(os.environ["CLIENTS"])
    if example.suffix == ".mjs":  # Node.js looks for packages beside the program
        command = ["node", shutil.copy(example, place / "js"), url]
    else:
        command = [str(place / "bin" / "python"), "-W", "ignore", str(example), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(600))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert sum(line.startswith("call ") for line in lines) >= 3
    assert sum(line.startswith("answer ") for line in lines) == 3
    reused, prompt = map(int, re.findall(r"reused +(\d+) of (\d+)", done.stdout)[-1])
    assert reused > prompt / 2
