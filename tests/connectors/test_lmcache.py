"""The real LMCache with our store as its second level: vLLM's contexts outlive LMCache's server, kill -9 included.

With our serde they take a fraction of their bytes there, and what cannot be decoded is computed.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ctxreuse.block.format import parse, reseal
from ctxreuse.engines.text import HFText
from ctxreuse.store import open_store
from support.pages import ROOT
from support.vllm_engine import PLACE, Vllm
from support.waiting import patient, until

pytestmark = [pytest.mark.connectors, pytest.mark.daemon]

ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}
#: For the engines too: on a CPU they have no other way to LMCache's server.
TRANSFER = {"LMCACHE_MP_TRANSFER_MODE": "lmcache_driven"}
GUIDE = (ROOT / "docs" / "guide" / "lmcache.md").read_text("utf-8")


def prompt(seed: int, tokens: int) -> list[int]:
    return [random.Random(seed).randrange(1, 512) for _ in range(tokens)]


#: Of 10, 1 and 1 whole chunks of 64.
PROMPTS = [prompt(1, 700), prompt(2, 96), prompt(3, 97)]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (ENVIRONMENT | TRANSFER).items():
        monkeypatch.setenv(name, value)


class Server:
    """LMCache's server, by the guide's command, over a store; ``serde``: by the one that has our serde."""

    def __init__(self, store: Path, log: Path, *, serde: bool = False) -> None:
        commands = [text for text in re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL) if "lmcache server" in text]
        (command,) = (text for text in commands if ('"serde"' in text) == serde)
        self.port, self.http = free_port(), free_port()
        command = command.replace("/var/lib/ctxreuse/lmcache", str(store)).replace("--l1-size-gb 8", "--l1-size-gb 1")
        more = f"--port {self.port} --http-host 127.0.0.1 --http-port {self.http} --chunk-size 64"
        env = os.environ | {"PATH": f"{PLACE / 'bin'}:{os.environ['PATH']}"}
        with open(log, "a") as output:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec {command.rstrip()} {more}"],
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )
        until(partial(self._ready, log), 120, poll=1)

    def _ready(self, log: Path) -> bool:
        assert self._process.poll() is None, log.read_text()[-3000:]
        try:
            return httpx.get(f"http://127.0.0.1:{self.http}/healthcheck", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def counts(self) -> dict[str, Any]:
        """What our adapter reports."""
        status = httpx.get(f"http://127.0.0.1:{self.http}/status", timeout=patient(10)).json()
        (found,) = status["storage_manager"]["l2_adapters"]
        return dict(found)

    def end(self, by: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, by)
        try:
            self._process.wait(patient(30))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


@contextmanager
def serving(store: Path, log: Path, by: signal.Signals = signal.SIGTERM, *, serde: bool = False) -> Iterator[Server]:
    server = Server(store, log, serde=serde)
    try:
        yield server
    finally:
        server.end(by)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def engine_of(model: Path, server: Server, log: Path, **options: Any) -> Vllm:
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
    transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return Vllm(model, None, log, kv_transfer_config=transfer, **options)


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [one["cached"] for one in answers]


def ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [one["ids"] for one in answers]


def damage(store: Path) -> None:
    """Change a byte in every value."""
    with open_store(store, readonly=True) as opened, opened.read() as reader:
        heads = [bytes(view.plane(0, "value")[:48]) for e in opened.walk() if (view := reader.peek(e.key)) is not None]
    file = store / "blocks" / "data.mdb"
    data = bytearray(file.read_bytes())
    for head in heads:
        for found in re.finditer(re.escape(head), bytes(data)):
            data[found.start() + 1000] ^= 0x40
    file.write_bytes(data)


def test_contexts_outlive_the_server_are_apart_by_tenant_and_recomputed_if_damaged(tiny: Path, tmp_path: Path) -> None:
    store, log = tmp_path / "store", tmp_path / "log"
    with Vllm(tiny, None, log) as engine:
        plain = ids(engine.ask(*PROMPTS))
    with serving(store, log, signal.SIGKILL) as server, engine_of(tiny, server, log) as engine:
        assert ids(engine.ask(*PROMPTS)) == plain
        until(lambda: server.counts()["stored"] == 12)
        assert cached(engine.ask(PROMPTS[0], salt="a")) == [0]
        until(lambda: server.counts()["stored"] == 22)
        assert server.counts()["unstored"] == 0
    with serving(store, log) as server, engine_of(tiny, server, log) as engine:
        found = engine.ask(*PROMPTS)
        assert ids(found) == plain
        assert cached(found) == [640, 64, 64]
        assert cached(engine.ask(PROMPTS[0], salt="b")) == [0]
        assert cached(engine.ask(PROMPTS[0], salt="a")) == [640]
        assert server.counts()["loaded"] == 22
    damage(store)
    with serving(store, log) as server, engine_of(tiny, server, log) as engine:
        assert ids(engine.ask(*PROMPTS)) == plain
        assert server.counts()["missed"] > 0
        until(lambda: server.counts()["stored"] >= 12)
        again = engine.ask(*PROMPTS)
        assert ids(again) == plain
        assert cached(again) == [640, 64, 64]


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a profile of SmolLM2 is, made of little text."""
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CTXREUSE_CARDS", str(folder))
        command = [
            sys.executable,
            "-m",
            "ctxreuse",
            "calibrate",
            "smollm2",
            "--windows",
            "4",
            "--levels",
            "0.01",
            "--quiet",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patient(600), check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        yield folder


def spoil(store: Path) -> None:
    """Change a byte in what the serde made of each value, with checksums of the store that fit again."""
    with open_store(store) as opened:
        for key in [entry.key for entry in opened.walk()]:
            with opened.read() as reader:
                view = reader.peek(key)
                assert view is not None
                data = bytearray(view.plane(0, "value"))
                data[len(data) // 2] ^= 0x40
                sealed = reseal(view, {(0, "value"): bytes(data)})
            opened.drop(key, "corrupt")
            assert opened.put(key, sealed)
        opened.flush(patient(10))


def test_coded_chunks_give_nearly_the_same_answers_and_spoiled_ones_are_computed(
    smollm2: Path, profiles: Path, tmp_path: Path
) -> None:
    store, log, options = tmp_path / "store", tmp_path / "log", {"dtype": "bfloat16"}
    text = (ROOT / "docs" / "guide" / "vllm.md").read_text("utf-8")
    words = HFText.open(smollm2)
    assert words is not None
    tokens = words.encode(text).tolist()
    prompts = [tokens[:700], tokens[300:740]]
    assert [len(one) for one in prompts] == [700, 440]
    with Vllm(smollm2, None, log, **options) as engine:
        plain = engine.ask(*prompts)
    with (
        serving(store, log, signal.SIGKILL, serde=True) as server,
        engine_of(smollm2, server, log, **options) as engine,
    ):
        assert cached(engine.ask(*prompts)) == [0, 0]
        until(lambda: server.counts()["stored"] == 16, 60, poll=0.2)
    sizes: dict[int, list[int]] = {}
    with open_store(store, readonly=True) as opened, opened.read() as reader:
        for entry in opened.walk():
            view = reader.peek(entry.key)
            assert view is not None
            chunk = parse(np.frombuffer(view.plane(0, "value"), np.uint8))
            assert chunk.header.level.startswith("kl-0.01@")
            sizes.setdefault(chunk.header.rope_at, []).append(len(chunk.buffer))
    assert sorted((at, len(found)) for at, found in sizes.items()) == [(64 * i, 2 if i < 6 else 1) for i in range(10)]
    raw = 2 * 30 * 64 * 3 * 64 * 2  # K and V, layers, tokens, heads, dim, bytes of bfloat16
    assert sum(map(sum, sizes.values())) < 16 * raw / 4
    with serving(store, log, serde=True) as server, engine_of(smollm2, server, log, **options) as engine:
        found = engine.ask(*prompts)
        assert cached(found) == [640, 384]
        for ours, theirs in zip(found, plain, strict=True):
            assert ours["ids"][0] == theirs["ids"][0]
            assert ours["logprobs"][0] != theirs["logprobs"][0]  # else nothing was loaded
            assert abs(ours["logprobs"][0] - theirs["logprobs"][0]) < 0.3
        assert server.counts()["loaded"] == 16
    spoil(store)
    with serving(store, log, serde=True) as server, engine_of(smollm2, server, log, **options) as engine:
        assert ids(engine.ask(*prompts)) == ids(plain)
        assert server.counts()["loaded"] > 0  # by the adapter, whose checksums fit


def test_the_bench_of_lmcache_finds_what_it_stored(tmp_path: Path) -> None:
    adapter = {
        "type": "plugin", "module_path": "ctxreuse_cloud.connectors.lmcache", "class_name": "CtxReuseL2Adapter",
        "adapter_params": {"path": str(tmp_path / "store"), "capacity": "512MB"},
    }  # fmt: skip
    words = ["--data-size-kb", "256", "--num-keys", "32", "--rounds", "3", "--lookup-max-hit-rate", "1.0"]
    result = tmp_path / "result.json"
    command = [str(PLACE / "bin" / "lmcache"), "bench", "l2", "--l2-adapter", json.dumps(adapter), *words]
    done = subprocess.run(
        [*command, "--no-skip-verify", "--format", "json", "--output", str(result)],
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "All 32 keys data verified OK" in done.stdout + done.stderr
    metrics = json.loads(result.read_text())["metrics"]
    assert [metrics[f"op_{i}"]["total_success"] for i in range(3)] == [96, 96, 96]


def test_a_setting_that_is_none_ends_the_server_with_what_there_is(tmp_path: Path) -> None:
    adapter = {
        "type": "plugin", "module_path": "ctxreuse_cloud.connectors.lmcache", "class_name": "CtxReuseL2Adapter",
        "adapter_params": {"pth": "x"},
    }  # fmt: skip
    words = ["--host", "127.0.0.1", "--port", str(free_port()), "--l1-size-gb", "1", "--eviction-policy", "LRU"]
    done = subprocess.run(
        [str(PLACE / "bin" / "lmcache"), "server", *words, "--l2-adapter", json.dumps(adapter)],
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert done.returncode != 0
    assert "adapter_params has no setting 'pth'" in done.stdout + done.stderr
