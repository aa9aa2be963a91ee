"""The real vLLM with our connector: the same tokens as without, kept over its end, apart by tenant, never wrong."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from ctxreuse.store import open_store
from support.pages import ROOT
from support.vllm_engine import ENVIRONMENT, PLACE, Vllm
from support.waiting import patient, until

pytestmark = [pytest.mark.connectors, pytest.mark.daemon]


def prompt(seed: int, tokens: int) -> list[int]:
    made = random.Random(seed)
    return [made.randrange(1, 512) for _ in range(tokens)]


#: Lengths below, at, and above ends of pages of 32.
PROMPTS = [prompt(1, 700), prompt(2, 96), prompt(3, 97), prompt(4, 40), [*prompt(1, 500), *prompt(5, 60)]]


def same(answers: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Compare as many tokens as the shorter answers have."""
    return all(
        all(a == b for a, b in zip(one["ids"], other["ids"]))
        and all(abs(a - b) < 1e-3 for a, b in zip(one["logprobs"], other["logprobs"]))
        for one, other in zip(answers, others, strict=True)
    )


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [one["cached"] for one in answers]


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What vLLM answers without a connector."""
    with Vllm(tiny, None, tmp_path_factory.mktemp("alone") / "log") as engine:
        return engine.ask(*PROMPTS, new=150)


def stored(store: Path) -> int:
    with open_store(store, readonly=True) as opened:
        return opened.stats().blocks


def test_contexts_outlive_the_engine_and_are_apart_by_tenant(
    tiny: Path, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    store, log = tmp_path / "store", tmp_path / "log"
    with Vllm(tiny, store, log, max_num_batched_tokens=256) as engine:  # prompts are computed in parts
        first = engine.ask(*PROMPTS)
        assert same(first, alone)
        until(lambda: stored(store) >= 30)
        assert cached(engine.ask(*PROMPTS)) == [672, 64, 96, 32, 544]
    with Vllm(tiny, store, log) as engine:
        again = engine.ask(*PROMPTS)
        assert same(again, alone)
        assert cached(again) == [672, 64, 96, 32, 544]
        # The answer is part of the next turn's prompt.
        long = engine.ask(prompt(8, 60), new=40)[0]["ids"]
        until(lambda: engine.ask([*prompt(8, 60), *long, 5])[0]["cached"] == 96)
        mine = engine.ask(PROMPTS[0], salt="a")
        assert cached(mine) == [0]
        assert same(mine, alone[:1])
        until(lambda: cached(engine.ask(PROMPTS[0], salt="a")) == [672])
        assert cached(engine.ask(PROMPTS[0], salt="b")) == [0]
        fresh = prompt(9, 800)
        before = engine.ask(fresh)
        engine.kill()
    with Vllm(tiny, store, log) as engine:
        assert same(engine.ask(*PROMPTS), alone)
        after = engine.ask(fresh)
        assert same(after, before)
        assert cached(engine.ask(*PROMPTS)) == [672, 64, 96, 32, 544]
    assert "invalid" not in log.read_text()


def test_another_page_size_or_type_misses_and_a_damaged_block_is_computed_again(
    tiny: Path, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    store, log = tmp_path / "store", tmp_path / "log"
    with Vllm(tiny, store, log) as engine:
        engine.ask(*PROMPTS)
        until(lambda: stored(store) >= 30)
    with Vllm(tiny, store, log, block_size=64) as engine:
        other = engine.ask(*PROMPTS[:2])
        assert cached(other) == [0, 0]
        assert same(other, alone[:2])
    with Vllm(tiny, store, log, dtype="bfloat16") as engine:
        assert cached(engine.ask(*PROMPTS[:2])) == [0, 0]
    damage(store)
    with Vllm(tiny, store, log) as engine:
        found = engine.ask(*PROMPTS)
        assert same(found, alone)
        until(lambda: cached(engine.ask(PROMPTS[0])) == [672])
        assert same(engine.ask(PROMPTS[0]), alone[:1])
    assert "Recovered from KV load failure" in log.read_text()


def damage(store: Path) -> None:
    """Change a byte in V of the last layer of the third block of the first prompt."""
    with open_store(store, readonly=True) as opened:
        ids = PROMPTS[0][64:96]
        with opened.read() as reader:
            for entry in opened.walk():
                view = reader.peek(entry.key)
                if view is not None and view.tokens.tolist() == ids and entry.end == 96:
                    plane = bytes(view.plane(2, "v"))
                    if len(plane) == 2 * 32 * 32 * 4:  # float32
                        break
    file = store / "blocks" / "data.mdb"
    data = bytearray(file.read_bytes())
    for found in re.finditer(re.escape(plane), bytes(data)):
        data[found.start() + 200] ^= 0x40
    file.write_bytes(data)


def test_two_engines_share_a_store_and_the_second_writes_when_the_first_has_ended(
    tiny: Path, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    # Room for 1,280 tokens: answers that grow preempt one another, in pages that vLLM itself reuses.
    little = {"num_gpu_blocks_override": 40, "disable_log_stats": False, "enable_prefix_caching": True}
    with Vllm(tiny, store, tmp_path / "one") as writer, Vllm(tiny, store, tmp_path / "other", **little) as other:
        writer.ask(*PROMPTS)
        until(lambda: stored(store) >= 30)
        shared = other.ask(*PROMPTS)
        assert cached(shared) == [672, 64, 96, 32, 544]
        assert same(shared, alone)
        assert cached(other.ask(prompt(20, 200))) == [0]
        writer.close()
        fresh = prompt(21, 200)
        time.sleep(5)  # it tries every five seconds
        before = stored(store)
        other.ask(fresh)
        until(lambda: stored(store) == before + 6)
        long = other.ask(*PROMPTS, new=150)
        assert same(long, alone)
        assert long[0]["preempted"] > 0


def test_a_hinted_context_outlives_others_in_a_full_store(tiny: Path, tmp_path: Path) -> None:
    def hints(name: str) -> dict[str, Any]:
        action = {"action_id": "a", "action_type": name, "action_version": "1.0", "payload": {"ttl_seconds": 600}}
        return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}

    kept, plain = prompt(50, 101), prompt(51, 101)
    with Vllm(tiny, tmp_path / "store", tmp_path / "log", capacity="2MB") as engine:
        engine.ask(kept, hints=hints("kv.pin"))
        engine.ask(plain)
        for seed in range(60, 100):
            engine.ask(prompt(seed, 101), new=1)
        cached = [engine.ask(text)[0]["cached"] for text in (kept, plain)]
    assert cached == [96, 0]


def test_smollm2_in_bfloat16_answers_the_same(smollm2: Path, tmp_path: Path) -> None:
    """Half precision, pages of 128 tokens, scheduler and worker in processes of their own: vLLM's defaults here."""
    options: dict[str, Any] = {"dtype": "bfloat16", "block_size": 128, "processes": True}
    # What repeats has a next token by a margin: of two that are as likely, a pass of other sizes may choose the other.
    text = (prompt(30, 64) * 11)[:700]
    with Vllm(smollm2, None, tmp_path / "log", **options) as engine:
        plain = engine.ask(text, new=12)
    store = tmp_path / "store"
    for _ in range(2):
        with Vllm(smollm2, store, tmp_path / "log", **options) as engine:
            found = engine.ask(text, new=12)
            assert found[0]["ids"] == plain[0]["ids"]
            until(lambda: stored(store) >= 5)
    assert found[0]["cached"] == 640


def test_the_argument_of_the_guide_serves(smollm2: Path, tmp_path: Path) -> None:
    """The command of docs/guide/vllm.md with a folder, a port and a small model; the metrics that it names."""
    guide = (ROOT / "docs" / "guide" / "vllm.md").read_text("utf-8")
    command = next(text for text in re.findall(r"```sh\n(.*?)```", guide, re.DOTALL) if text.startswith("vllm serve"))
    command = command.replace("/var/lib/ctxreuse/vllm", str(tmp_path / "store")).replace("MODEL_FOLDER", str(smollm2))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = f"--port {port} --dtype bfloat16 --enforce-eager --max-model-len 2048 --enable-prompt-tokens-details"
    names = re.findall(r"^\| `(\w+:?\w+_total)`", guide, re.MULTILINE)
    assert len(names) == 6
    text = "The lighthouse keeper counts the ships that pass. " * 60
    body = {"model": str(smollm2), "prompt": text, "max_tokens": 8, "temperature": 0}
    answers = []
    url = f"http://127.0.0.1:{port}"
    for _ in range(2):
        with served(f"{command.rstrip()} {words}", tmp_path / "log") as process:
            until(partial(answers_or_ends, url, process), 120, poll=1)
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=patient(60)).json())
            metrics = httpx.get(f"{url}/metrics", timeout=patient(10)).text
            assert [name for name in names if f"\n{name}{{" not in metrics] == []
    first, second = answers
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
    assert not details[0] or not details[0]["cached_tokens"]
    assert details[1]["cached_tokens"] >= 512


def answers_or_ends(url: str, process: subprocess.Popen[bytes]) -> bool:
    try:
        return process.poll() is not None or httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def served(command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command of a shell in vLLM's environment, ended as a service manager ends it."""
    env = os.environ | ENVIRONMENT | {"PATH": f"{PLACE / 'bin'}:{os.environ['PATH']}"}
    with open(log, "a") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], stdout=output, stderr=output, env=env, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(patient(30))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
