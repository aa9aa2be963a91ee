"""What the store has is published by vLLM in its own format, so that a router that follows engines follows it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from ctxreuse.identity.keys import KEY_BYTES
from support.vllm_engine import Vllm
from support.waiting import patient, until

pytestmark = [pytest.mark.connectors, pytest.mark.daemon]


class Published:
    """Events that vLLM has published, and the numbers of their batches."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.events: list[dict[str, Any]] = []
        self.numbers: list[int] = []

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Receive what has come, and return all of one kind."""
        try:
            while True:
                _, number, batch = self._socket.recv_multipart()
                self.numbers.append(int.from_bytes(number, "big"))
                self.events += msgpack.unpackb(batch)[1]
        except zmq.Again:
            return [event for event in self.events if event["type"] == kind]


def test_blocks_that_are_stored_and_evicted_are_published(tiny: Path, tmp_path: Path) -> None:
    made = np.random.default_rng(40)

    def prompt(tokens: int) -> list[int]:
        return list(map(int, made.integers(1, 512, tokens)))

    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVTIMEO, round(1e3 * patient(0.01)))
        socket.subscribe(b"")
        # With an address, and not *, vLLM's publisher is what connects.
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        options = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}"}
        published = Published(socket)
        with Vllm(tiny, tmp_path / "store", tmp_path / "log", capacity="2MB", kv_events_config=options) as engine:
            # What is published before the subscription has arrived is lost.
            until(lambda: engine.ask(prompt(40), new=1) and published.of("BlockStored"))
            text = prompt(100)
            ids = [text[at : at + 32] for at in (0, 32, 64)]
            engine.ask(text, new=1)

            def blocks() -> list[dict[str, Any]]:
                engine.ask([1, 2, 3], new=1)  # events come with a step
                return [event for event in published.of("BlockStored") if event["token_ids"] in ids]

            until(lambda: len(blocks()) == 3)
            chain = blocks()
            assert [event["token_ids"] for event in chain] == ids
            keys = [event["block_hashes"][0] for event in chain]
            assert [event["parent_block_hash"] for event in chain] == [None, *keys[:2]]
            assert {(event["medium"], event["block_size"]) for event in chain} == {("STORAGE", 32)}
            assert {len(key) for key in keys} == {KEY_BYTES}
            assert [event.get("extra_keys") for event in chain] == [None] * 3
            mine = prompt(64)
            engine.ask(mine, salt="me", new=1)

            def salts() -> list[Any]:
                engine.ask([1, 2, 3], new=1)
                found = [one for one in published.of("BlockStored") if one["token_ids"] in (mine[:32], mine[32:])]
                return [event.get("extra_keys") for event in found]

            until(lambda: len(salts()) == 2)
            assert salts() == [[["me"]], None]
            for _ in range(4):
                engine.ask(prompt(700), new=1)
            until(lambda: engine.ask([1, 2, 3], new=1) and published.of("BlockRemoved"))
            stored = {key for event in published.of("BlockStored") for key in event["block_hashes"]}
            assert stored & {key for event in published.of("BlockRemoved") for key in event["block_hashes"]}
    assert published.numbers == list(range(published.numbers[0], published.numbers[0] + len(published.numbers)))
