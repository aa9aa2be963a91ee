"""Clouds and edges as processes on one machine: their settings, keys, signals and links, for test_link.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from demo.relay import Relay

from ctxreuse.bus.auth.allowlist import Allowed, AllowList
from ctxreuse.bus.auth.curve import KeyPair
from ctxreuse.bus.transport import BusClient, ClientOptions
from ctxreuse.daemon.lifecycle import read_address
from support.tiny_text import save_model
from support.waiting import patient, until

#: Documents of about 1,900 tokens each (a byte is a token), equal in nothing.
DOCUMENTS = ["".join(chr(97 + (i * i + k * i * 7 + k) % 26) for i in range(1900)) for k in range(4)]


def save_slow_model(folder: Path) -> Path:
    """Write a Llama with random weights that computes some thousand tokens a second."""
    larger = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_key_value_heads": 1}
    return save_model(folder, seed=11, positions=4096, initializer_range=0.15, **larger)


class Node:
    """One daemon: started, killed and started again with the same settings and store."""

    def __init__(self, folder: Path, face: str, name: str, settings: dict[str, dict[str, Any]]) -> None:
        self.face, self.store, self.log = face, folder / name, folder / f"{name}.log"
        self.file = folder / f"{name}.toml"
        self.settings = settings
        self.cards = str(folder / f"{name}-cards")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Node:
        """Begin; `ready` waits for it."""
        lines = [
            f"[{title}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in of.items())
            for title, of in self.settings.items()
        ]
        self.file.write_text("\n".join(lines))
        env = {name: value for name, value in os.environ.items() if not name.startswith("CTXREUSE_")}
        env |= {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "OMP_NUM_THREADS": "1"}
        env["CTXREUSE_CARDS"] = self.cards  # never those of whoever runs the tests
        command = [sys.executable, "-m", f"ctxreuse_{self.face}", "--config", str(self.file), "serve"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([*command, "--log-format", "json"], stdout=log, stderr=log, env=env)
        return self

    def ready(self) -> Node:
        def address() -> Any:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            found = read_address(self.store / f"{self.face}.json")
            return found if found is not None and found.pid == self.process.pid else None

        self.url: str = until(address, 120).url
        return self

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end; its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(patient(60))

    def status(self) -> Any:
        return httpx.get(self.url + "/api/status", timeout=patient(60)).json()

    def link(self) -> Any:
        """How an edge's link stands."""
        return self.status()["clouds"][0]

    def blocks(self) -> int:
        """Blocks in its store."""
        return int(self.status()["store"]["stats"]["blocks"])

    def said(self, message: str) -> list[dict[str, Any]]:
        """Lines of its log with ``message`` in them."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if message in line["message"]]

    def ask(self, document: str, question: str = "What?", tokens: int = 12) -> tuple[str, dict[str, int]]:
        """The answer to a question about a document, and the prompt's tokens by source."""
        answer = httpx.post(
            self.url + "/v1/chat/completions", json=body(document, question, tokens), timeout=patient(120)
        )
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]["sources"]


def body(document: str, question: str = "What?", tokens: int = 12, **more: Any) -> dict[str, Any]:
    """A chat request, greedy."""
    messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": tokens, "ignore_eos": True} | more


class Cluster:
    """Nodes in one folder. The cloud keeps its port over restarts."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.allowed = AllowList(folder / "allow.toml")
        self._stack = ExitStack()
        self._nodes: list[Node] = []
        self._pairs: dict[str, KeyPair] = {}
        self.bus = ""

    def cloud(self, *, workers: int = 0, **settings: Any) -> Node:
        """Start a cloud, without engines unless told; ready when this returns."""
        bus = {"bind": "tcp://127.0.0.1:0", "key_file": self._key("cloud"), "allow_file": str(self.allowed.path)}
        cloud = {"port": 0, "store": str(self.folder / "cloud"), "prefill_workers": workers}
        sections: dict[str, dict[str, Any]] = {
            "bus": bus,
            "cloud": cloud,
            "engine": {"model": str(self.model), "threads": 1},
        }
        for setting, value in settings.items():
            section, found, field = setting.rpartition("__")
            sections.setdefault(section if found else "cloud", {})[field] = value
        node = self._node("cloud", "cloud", sections).start().ready()
        self.bus = node.status()["bus"]["endpoint"]
        bus["bind"] = self.bus
        return node

    def edge(self, name: str, *, tenant: str = "home", endpoint: str = "", **settings: Any) -> Node:
        """An edge that may connect as one of ``tenant``'s devices; not started."""
        key = self._key(name)
        self.allow(name, tenant)
        self._key("cloud")
        cloud = {"endpoint": endpoint or self.bus, "server_key": self._pairs["cloud"].public.hex(), "name": "cloud"}
        sections: dict[str, dict[str, Any]] = {
            "store": {"path": str(self.folder / name)},
            "engine": {"model": str(self.model), "threads": 1},
            "edge": {"port": 0},
            "bus": {"key_file": key, "clouds": [cloud]},
        }
        for setting, value in settings.items():
            section, _, field = setting.partition("__")
            sections[section][field] = value
        return self._node("edge", name, sections)

    def allow(self, name: str, tenant: str = "home") -> None:
        self.allowed.allow(Allowed(name, self._pairs[name].public, tenant, datetime.now(UTC)))

    def revoke(self, name: str) -> None:
        self.allowed.revoke(name, datetime.now(UTC))

    def link(self, name: str, space: bytes, *, tenant: str = "home") -> BusClient:
        """A link to the cloud in this process, as one of ``tenant``'s devices; the caller closes it."""
        self._key(name)
        self.allow(name, tenant)
        options = ClientOptions(
            keys=self._pairs[name], server_key=self._pairs["cloud"].public, name=name, spaces=(space,)
        )
        return BusClient(self.bus, options)

    def relay(self, rate: float | None = None) -> Relay:
        """A link to the cloud of ``rate`` bytes/s."""
        host, port = self.bus.removeprefix("tcp://").rsplit(":", 1)
        return self._stack.enter_context(Relay((host, int(port)), rate=rate))

    def close(self) -> None:
        for node in self._nodes:
            if node.process is not None:
                node.end(signal.SIGKILL)
        self._stack.close()

    def _node(self, face: str, name: str, settings: dict[str, dict[str, Any]]) -> Node:
        self._nodes.append(Node(self.folder, face, name, settings))
        return self._nodes[-1]

    def _key(self, name: str) -> str:
        file = str(self.folder / f"{name}.key")
        if name not in self._pairs:
            self._pairs[name] = KeyPair.new()
            self._pairs[name].write(file)
        return file


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
