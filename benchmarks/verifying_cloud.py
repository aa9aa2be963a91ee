"""A cloud whose model decodes or judges for an edge: the process of a bench, and a link to it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from ctxreuse_cloud.workers.pool import WorkerPool

from benchmarks.children import Child, relay
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.config import EngineConfig, LogConfig
from ctxreuse.engines.base import Engine
from ctxreuse.errors import LinkDownError
from ctxreuse.peer.fetch.verifiers import CloudVerifiers
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import open_store

__all__ = ["linked", "main", "verifying_cloud"]

#: Seconds that its engine's process may take to be ready.
_WAIT = 180.0
#: Bytes a second of the link.
_RATE = 100e6 / 8


def verifying_cloud(folder: str, model: str, engine: str = "auto") -> Child:
    """Start one with its store in a folder and one engine process, of one thread; it says its endpoint."""
    return Child("benchmarks.verifying_cloud", folder, model, engine)


@contextmanager
def linked(engine: Engine, endpoint: str, rtt: float) -> Iterator[tuple[Runtime, CloudVerifiers]]:
    """A runtime that may let the cloud verify, over a link of this round trip in seconds, and who does so."""
    with (
        relay(endpoint, _RATE, rtt) as wire,
        BusClient(f"tcp://127.0.0.1:{wire.said}", ClientOptions(name="cloud", models=[engine.space])) as link,
    ):
        deadline = time.monotonic() + _WAIT
        while link.state != "up" or not link.verifies:
            if time.monotonic() > deadline:
                raise LinkDownError("the bench waited in vain for its link")
            time.sleep(0.01)
        runtime = Runtime(engine, None, RuntimeOptions(verify=True))
        yield runtime, CloudVerifiers([link])
        runtime.close()


def main(arguments: Sequence[str]) -> None:
    """Serve as `verifying_cloud` says: print the endpoint, end with the input."""
    folder, model, engine = arguments
    config = msgspec.convert({"model": model, "engine": engine, "threads": 1}, EngineConfig)
    store_folder = Path(folder) / "store"
    with open_store(store_folder, capacity=1 << 30) as store:
        workers = WorkerPool(1, config, LogConfig(level="error"), store=str(store_folder))
        workers.start()
        workers.settle(_WAIT)
        service = StoreService(store, Path(folder), ServeOptions(tenant_of=lambda _: "local", verifier=workers))
        with BusServer(service) as server:
            print(server.endpoint, flush=True)
            sys.stdin.read()
        workers.close()
        service.close()


if __name__ == "__main__":
    main(sys.argv[1:])
