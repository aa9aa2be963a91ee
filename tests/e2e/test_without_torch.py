"""A device with a GGUF and without torch: a daemon that answers real requests, is killed, and answers from disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from ctxreuse_agents import Memory

from ctxreuse.daemon.lifecycle import read_address
from support.tiny_gguf import write_tiny_gguf
from support.waiting import patient, until

pytestmark = pytest.mark.daemon

#: What `ctxreuse[edge]` does not bring; the daemon's own processes see this, too.
BLOCKED = """
import sys
for name in ("torch", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub"):
    sys.modules[name] = None
"""
QUESTION = {"messages": [{"role": "user", "content": "What is in the box? " * 16}], "temperature": 0, "max_tokens": 8}


@contextmanager
def served(tmp_path: Path, model: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    (tmp_path / "blocked").mkdir(exist_ok=True)
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCKED)
    env = {name: value for name, value in os.environ.items() if not name.startswith("CTXREUSE_")}
    env |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "blocked"), *filter(None, sys.path)])
    command = [sys.executable, "-m", "ctxreuse_edge", "serve", "--model", str(model), "--port", "0"]
    log = tmp_path / "log"
    with open(log, "ab") as out:
        child = subprocess.Popen([*command, "--store", str(tmp_path / "store")], env=env, stdout=out, stderr=out)
    try:

        def address() -> str:
            assert child.poll() is None, log.read_text()
            found = read_address(tmp_path / "store" / "edge.json")
            return found.url if found is not None and found.pid == child.pid else ""

        url = until(address, 60)
        with httpx.Client(base_url=url, timeout=patient(60)) as http:
            yield child, http
    finally:
        child.kill()
        child.wait()


def test_it_answers_and_reuses_after_a_kill(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    with served(tmp_path, model) as (child, http):
        first = http.post("/v1/chat/completions", json=QUESTION).json()
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny.gguf"
        until(lambda: http.get("/api/status").json()["store"]["stats"]["queued"] == 0)
        child.send_signal(signal.SIGKILL)
        child.wait(patient(30))
    with served(tmp_path, model) as (_, http):
        again = http.post("/v1/chat/completions", json=QUESTION).json()
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["sources"]["disk"] >= 256
        lines = list(http.post("/v1/chat/completions", json=QUESTION | {"stream": True}).iter_lines())
        assert lines[-2:] == ["data: [DONE]", ""]
        with Memory.open(tmp_path / "memory", engine=str(http.base_url)) as memory:  # it reads the GGUF's vocabulary
            session = memory.create("s")
            assert session.ask("What is in the box?", max_tokens=4, ignore_eos=True).text
            assert len(session.tokens()) > 4
