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


def test_blocks_that_are_stored_and_evicted_are_published(tiny: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(40)
    events: list[dict[str, Any]] = []
    numbers = []
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVTIMEO, round(1e3 * patient(0.01)))
        socket.subscribe(b"")
        port = socket.bind_to_random_port("tcp://127.0.0.1")  # with an address vLLM's publisher connects
        published = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{port}",
        }
        with Vllm(tiny, tmp_path / "store", tmp_path / "log", capacity="2MB", kv_events_config=published) as engine:

            def seen(kind: str, count: int) -> bool:
                engine.ask([1, 2, 3], new=1)  # events come with a step
                try:
                    while True:
                        _, number, batch = socket.recv_multipart()
                        numbers.append(int.from_bytes(number, "big"))
                        events.extend(msgpack.unpackb(batch)[1])
                except zmq.Again:
                    return sum(event["type"] == kind for event in events) >= count

            prompt = rng.integers(1, 512, 100).tolist()
            engine.ask(prompt, new=1)
            until(lambda: seen("BlockStored", 3))
            first, second, third = events[:3]
            assert {event["medium"] for event in events} == {"STORAGE"}
            assert [token for event in events[:3] for token in event["token_ids"]] == prompt[:96]
            assert first["parent_block_hash"] is None
            assert [second["parent_block_hash"], third["parent_block_hash"]] == [
                event["block_hashes"][0] for event in (first, second)
            ]
            assert all(len(event["block_hashes"][0]) == KEY_BYTES and event["block_size"] == 32 for event in events)
            for _ in range(4):
                engine.ask(rng.integers(1, 512, 700).tolist(), new=1)
            until(lambda: seen("BlockRemoved", 1))
    stored = {key for event in events if event["type"] == "BlockStored" for key in event["block_hashes"]}
    removed = {key for event in events if event["type"] == "BlockRemoved" for key in event["block_hashes"]}
    assert removed & stored
    assert numbers == list(range(len(numbers)))
