"""A cloud and two devices in one program: the parts of the daemons, for programs of your own.

    python examples/two_nodes.py

The first device computes a context and gives it to the cloud, the second one fetches it. Each has a store of its own;
the bus is plain TCP on loopback (beyond it, give both sides keys: `ctxreuse.bus.auth.curve`).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from ctxreuse import SamplingParams
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.cost import LinkEstimate
from ctxreuse.engines import open_engine
from ctxreuse.engines.base import Engine
from ctxreuse.peer.fetch.clouds import CloudPool
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.peer.sync.sync import Sync
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import open_store


def device(name: str, engine: Engine, folder: Path, cloud: str) -> str:
    """Answer one prompt, fetching from the cloud, then send the cloud the blocks it misses."""
    estimate = LinkEstimate()
    with (
        open_store(folder / name) as store,
        BusClient(cloud, ClientOptions(name="cloud", spaces=[engine.space.digest], estimate=estimate)) as link,
    ):
        while link.state != "up":
            time.sleep(0.01)
        runtime = Runtime(engine, store, RuntimeOptions(remote=CloudPool([(link, estimate)])))
        runtime.calibrate()
        assert engine.text is not None
        prompt = engine.text.encode("The lighthouse keeper opened the door and " * 200)
        answer = runtime.complete(prompt, SamplingParams(max_tokens=8))
        text = answer.drain()
        usage = answer.usage
        print(f"{name}: {text!r}, {usage.prompt_tokens} prompt tokens, reused {usage.tokens.by_source or 'nothing'}")
        runtime.close()
        store.flush()
        given = Sync(store, [link]).sync_now().links[0]
        print(f"{name}: gave the cloud {given.sent_blocks} blocks, {given.sent_bytes / 1e6:.0f} MB")
    return text


def main(folder: Path) -> None:
    engine = open_engine("smollm2")
    with open_store(folder / "cloud") as store:
        service = StoreService(store, folder, ServeOptions(tenant_of=lambda _: "local"))
        with BusServer(service) as server:
            first = device("first", engine, folder, server.endpoint)
            second = device("second", engine, folder, server.endpoint)
        service.close()
    print("the same answer:", first == second)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
