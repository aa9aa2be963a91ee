"""What vLLM says of its cache, followed over its own publisher: exactly what it has, also after what was missed."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_cloud.proxy.kv_events import BackendEvents, subscribe

from ctxreuse.config import BackendConfig
from ctxreuse.routing import PromptTokens, Reported
from support.vllm_engine import ENVIRONMENT, PLACE, Vllm
from support.waiting import until

pytestmark = [pytest.mark.connectors, pytest.mark.daemon]

PROGRAM = Path(__file__).with_name("run_publisher.py")
SIZE = 32


def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Publisher:
    """vLLM's, listening at ``endpoint``, in a process of its own."""

    def __init__(self, endpoint: str, replay: str, **options: Any) -> None:
        # It listens at an address with a *, and connects to others.
        chosen = {"endpoint": endpoint.replace("127.0.0.1", "*"), "replay_endpoint": replay, **options}
        self._process = subprocess.Popen(
            [str(PLACE / "bin" / "python"), str(PROGRAM), json.dumps(chosen)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        assert self._process.stdout is not None
        assert any(line.startswith("READY") for line in self._process.stdout)

    def publish(self, *events: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(events) + "\n")
        self._process.stdin.flush()

    def stores(self, *tokens: int, parent: int | None = None) -> None:
        fields = {
            "block_hashes": [hash(tokens)], "parent_block_hash": parent, "token_ids": list(tokens),
            "block_size": len(tokens), "lora_id": None, "medium": "GPU", "lora_name": None,
        }  # fmt: skip
        self.publish(["BlockStored", fields])

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextmanager
def following(endpoint: str, replay: str) -> Iterator[BackendEvents]:
    events = BackendEvents("vllm")
    config = BackendConfig(url="http://127.0.0.1:1", kv_events=endpoint, kv_replay=replay)
    with closing(subscribe(config, events)):
        yield events


def test_its_publisher_replays_what_was_missed_and_starts_again() -> None:
    endpoint, replay = address(), address()
    with closing(Publisher(endpoint, replay)) as publisher:
        for n in range(1, 50):
            publisher.stores(n, n)
        with following(endpoint, replay) as events:
            until(lambda: publisher.stores(0, 0) or events.source == "events", poll=0.1)
            until(lambda: events.match(PromptTokens.of([7, 7, 8])) == Reported(2, True))  # it may still be publishing
            publisher.publish(["BlockRemoved", {"block_hashes": [hash((7, 7))], "medium": "GPU"}])
            until(lambda: events.match(PromptTokens.of([7, 7, 8])) == Reported(0, True))
            publisher.close()
            until(lambda: events.source == "text")
            with closing(Publisher(endpoint, replay)) as again:
                again.stores(3, 3)
                until(lambda: again.stores(0, 0) or events.source == "events", poll=0.1)
                until(lambda: events.match(PromptTokens.of([3, 3, 8])) == Reported(2, True))
                assert events.match(PromptTokens.of([8, 8, 8])) == Reported(0, True)


def test_what_its_publisher_does_not_keep_is_known_to_be_missing() -> None:
    endpoint, replay = address(), address()
    with closing(Publisher(endpoint, replay, buffer_steps=3)) as publisher, following(endpoint, replay) as events:
        for n in range(1, 50):
            publisher.stores(n, n)
        until(lambda: publisher.stores(0, 0) or events.source != "text", poll=0.1)
        if events.source == "both":  # it was connected too late for the first ones
            assert events.match(PromptTokens.of([7, 7, 8])) == Reported(0, False)
        publisher.publish(["AllBlocksCleared", {}])
        until(lambda: events.source == "events")


def test_the_engine_has_what_it_says(tiny: Path, tmp_path: Path) -> None:
    """Prompts in a cache too small for all: what is said of each is what the engine then finds."""
    endpoint, replay = address(), address()
    config = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint.replace("127.0.0.1", "*"),
        "replay_endpoint": replay,
    }  # fmt: skip
    made = random.Random(5)
    bases = [[made.randrange(1, 512) for _ in range(400)] for _ in range(4)]
    options = {"enable_prefix_caching": True, "num_gpu_blocks_override": 48, "max_num_seqs": 1}
    with (
        Vllm(tiny, None, tmp_path / "log", kv_events_config=config, **options) as engine,
        following(endpoint, replay) as events,
    ):
        until(lambda: engine.ask([9] * 40, new=1) and events.source == "events", poll=0.1)
        hits = 0
        for _ in range(30):
            base = made.choice(bases)
            prompt = base[: made.randrange(40, 400)] + [made.randrange(1, 512) for _ in range(made.randrange(60))]
            said = events.match(PromptTokens.of(prompt))
            assert said is not None
            found = engine.ask(prompt, new=1)[0]["cached"]
            # It computes at least one token itself.
            assert said == Reported(found, True) or said.tokens == found + SIZE >= len(prompt)
            hits += found
            engine.ask([1, 2, 3], new=1)  # so that the events of the step before are sent
            now = len(prompt) // SIZE * SIZE
            until(lambda prompt=prompt, now=now: events.match(PromptTokens.of(prompt)) == Reported(now, True))
        assert hits > 1000
        assert events.lost <= 1
