"""Real clients run an agent with two tools over three turns against a real daemon on SmolLM2: `make test-clients`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.waiting import patient, until

pytestmark = [pytest.mark.clients, pytest.mark.model, pytest.mark.daemon]

#: A known name or a GGUF file: `make test-clients MODEL=…`.
MODEL = os.environ.get("CLIENTS_MODEL") or "smollm2"
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clients").glob("*.*"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("daemon")
    words = ["serve", "--model", MODEL, "--port", "0", "--store", str(folder / "store")]
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
def test_an_agent_calls_tools_and_its_prompt_is_reused(url: str, example: Path, tmp_path: Path) -> None:
    before = status(url)
    place = Path(os.environ["CLIENTS"])
    javascript = example.suffix == ".mjs"
    program = (place / "js" if javascript else tmp_path) / example.name  # Node.js looks for packages beside it
    program.write_text(example.read_text("utf-8").replace("smollm2", served(url)), "utf-8")
    command = ["node"] if javascript else [str(place / "bin" / "python"), "-W", "ignore"]
    command += [str(program), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(600))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert sum(line.startswith("call ") for line in lines) >= 3
    assert sum(line.startswith("answer ") for line in lines) == 3
    printed = re.findall(r"reused +(\d+) of (\d+)", done.stdout)
    reused, prompt = map(int, printed[-1]) if printed else counted(url, before)
    assert reused > prompt / 2


def counted(url: str, before: Any) -> tuple[int, int]:
    """Tokens that were reused and all of prompts since then, for clients that show only the latter."""
    now = status(url)
    tokens = {source: count - before[source] for source, count in now.items()}
    return sum(tokens.values()) - tokens["compute"], sum(tokens.values())


def served(url: str) -> str:
    """The name of the daemon's model."""
    with urllib.request.urlopen(url + "/v1/models") as answer:
        return str(json.load(answer)["data"][0]["id"])


def status(url: str) -> Any:
    with urllib.request.urlopen(url + "/api/status") as answer:
        return json.load(answer)["tokens"]


EMBED = """
import sys
from ollama import Client
from openai import OpenAI
texts = ["The weather in Paris is sunny.", "It is warm in the French capital.", "The bank raised its rates."]
openai = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
rows = [row.embedding for row in openai.embeddings.create(model="default", input=texts).data]
dots = [sum(a * b for a, b in zip(rows[0], row)) for row in rows]
assert dots[0] > dots[1] > dots[2], dots
same = Client(host=sys.argv[1]).embed(model="wordllama-l2-256", input=texts).embeddings
assert all(abs(a - b) < 1e-6 for one, two in zip(rows, same) for a, b in zip(one, two))
"""


def test_embeddings_are_read_by_the_clients_of_openai_and_ollama(url: str) -> None:
    command = [str(Path(os.environ["CLIENTS"]) / "bin" / "python"), "-W", "ignore", "-c", EMBED, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr[-3000:]
