"""The daemon put together: what it opens and in which order, what it serves, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, runtime_checkable

from starlette.routing import Router

from ctxreuse import models
from ctxreuse.codec import Codec
from ctxreuse.config import Settings
from ctxreuse.daemon.front import Front, is_loopback, read_keys
from ctxreuse.daemon.life import Daemon
from ctxreuse.daemon.probes import probes
from ctxreuse.engines import Engine, open_engine
from ctxreuse.errors import StoreError, StoreOwnedError
from ctxreuse.lab.recorder import Recorder, open_recorder
from ctxreuse.metrics import watch_store
from ctxreuse.model import ModelSpace
from ctxreuse.runtime import Runtime
from ctxreuse.store import Ledger, TieredStore, open_store
from ctxreuse.store.policy.states import StatePolicy
from ctxreuse.why import FILE, RequestBook
from ctxreuse_edge.api import routes
from ctxreuse_edge.contexts import Contexts
from ctxreuse_edge.keeper import Keeper
from ctxreuse_edge.links import Links
from ctxreuse_edge.node import ModelName, Node
from ctxreuse_edge.worker import Worker

__all__ = ["ADDRESS_FILE", "address_file", "application", "opened", "serve"]

log = logging.getLogger(__name__)

#: In the store's folder: where the daemon that owns it can be reached.
ADDRESS_FILE = "edge.json"

# How many answers advance side by side: each has a context in memory, and one more slows all others.
_RUNNING = 4


def address_file(settings: Settings) -> Path:
    """The file that says where the daemon of these settings can be reached."""
    return settings.store.folder() / ADDRESS_FILE


def serve(settings: Settings, engine: Engine | None = None) -> int:
    """Run the daemon until it is told to stop; returns the exit code. ``engine``: in place of that of the settings.

    Raises ConfigError, StoreOwnedError and what opening the engine raises.
    """
    edge = settings.edge
    daemon = Daemon("edge", host=edge.host, port=edge.port, drain=edge.drain, address_file=address_file(settings))
    node = Node()
    app = application(settings, daemon, node)
    print(f"ctxreuse-edge listens on {daemon.bind()}", flush=True)
    return daemon.run(app, lambda: opened(settings, node, engine))


def application(settings: Settings, daemon: Daemon, node: Node) -> Front:
    """Everything that is served over HTTP, as one ASGI application."""
    metrics, keys = node.metrics, read_keys(settings.edge.api_key_file)
    local = is_loopback(settings.edge.host)
    if not (local or keys):
        log.warning("anyone who reaches %s may use this daemon: set edge.api_key_file", settings.edge.host)
    return Front(
        Router([*probes(daemon.not_ready, metrics.render), *routes(node)]),
        metrics=metrics,
        route=_route,
        not_ready=daemon.not_ready,
        keys=keys,
        local=local,
    )


@contextlib.asynccontextmanager
async def opened(settings: Settings, node: Node, engine: Engine | None = None) -> AsyncIterator[Node]:
    """Fill ``node`` with everything it needs, and close that again, last opened first."""
    stack = ExitStack()
    try:
        await asyncio.to_thread(_open, settings, node, engine, stack)
        yield node
    finally:
        await asyncio.to_thread(stack.close)


def _open(settings: Settings, node: Node, engine: Engine | None, stack: ExitStack) -> None:
    started = time.monotonic()
    folder = settings.store.folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The store first: that another daemon has it must be known before a model is loaded for seconds.
    ledger = Ledger.open(folder)
    stack.callback(ledger.close)
    store = _open_store(settings, folder)
    stack.callback(store.close)
    chosen = settings.engine
    if engine is None:
        engine = open_engine(
            chosen.model,
            dtype=chosen.dtype,
            threads=chosen.threads or None,
            chunk=chosen.chunk,
            whole=chosen.whole,
        )
    recorder = _open_recorder(settings, engine.space)
    if recorder is not None:
        stack.callback(recorder.close)
    links = Links(node.metrics, folder)
    stack.callback(links.close)
    texts = settings.edge.why == "text"
    requests = RequestBook(folder / FILE if store.disk is not None else None, texts=texts).open()
    stack.callback(requests.close)
    live_bytes = settings.edge.live_bytes
    runtime = Runtime(
        engine,
        store,
        live_bytes=live_bytes,
        metrics=node.metrics,
        cost=links.cost,
        requests=requests,
        states=StatePolicy(replay=settings.store.replay),
        repair=chosen.repair,
    )
    runtime.recorder = recorder
    stack.callback(runtime.close)
    if settings.bus.clouds and not len(links.cost.prefill):
        runtime.calibrate()
    links.connect(settings.bus, engine.space, lossy=settings.edge.lossy, on_card=lambda: _renew(runtime))
    runtime.remote = links.remote
    worker = Worker(running=_RUNNING, waiting=settings.edge.max_waiting)
    stack.callback(worker.close)
    # Before the worker: it waits for work that may wait for a link.
    stack.callback(links.stop)
    if settings.edge.sync:
        links.give(store, rate=settings.edge.sync_rate, busy=lambda: worker.held > 0)
    contexts = Contexts(ledger, runtime, store, folder / "pins.json")
    keeper = Keeper(runtime, lambda: worker.held > 0, folder / "pauses.bin")
    stack.callback(keeper.close)
    keeper.watch(node.metrics)
    disk = store.disk
    watch_store(node.metrics, store.stats, disk.stats if disk is not None else None, lambda: runtime.pool.nbytes)
    node.metrics.watch(lambda: node.metrics.set("ctxreuse_http_waiting_requests", worker.held))
    node.fill(settings, runtime, ledger, store, contexts, worker, links, _name(chosen.model))
    log.info("opened", extra={"store": str(folder), "model": node.model.id, "seconds": time.monotonic() - started})


@runtime_checkable
class Recoded(Protocol):
    """An engine that can be given another codec."""

    codec: Codec | None


def _renew(runtime: Runtime) -> None:
    """A card has come: what the engine reads and the store encodes with is of the newest one."""
    engine, codec = runtime.engine, Codec.open(runtime.engine.space)
    if isinstance(engine, Recoded):
        engine.codec = codec
    if runtime.store is not None:
        runtime.store.adopt(codec)


def _open_recorder(settings: Settings, space: ModelSpace) -> Recorder | None:
    edge = settings.edge
    if not edge.record:
        return None
    return open_recorder(
        edge.record, edge.record_bytes, block_tokens=space.block_tokens, token_bytes=space.token_nbytes
    )


def _open_store(settings: Settings, folder: Path) -> TieredStore:
    wanted = settings.store
    try:
        return open_store(
            folder,
            capacity=wanted.capacity,
            host_bytes=wanted.host_bytes,
            policy=wanted.policy,
            level=wanted.level,
            demote=wanted.demote,
        )
    except StoreOwnedError:
        raise
    except StoreError as error:
        # KV is a cache: without a disk all works, only slower.
        log.warning("KV is kept in memory only: %s", error)
        return open_store(None, host_bytes=wanted.host_bytes)


def _name(model: str) -> ModelName:
    folder = models.path(model) if model in models.CATALOG else Path(model).expanduser().absolute()
    return ModelName(model if model in models.CATALOG else folder.name, str(folder))


def _route(path: str) -> str:
    for prefix, name in (
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "completions"),
        ("/v1/models", "models"),
        ("/api/contexts", "contexts"),
        ("/api/", "api"),
    ):
        if path.startswith(prefix):
            return name
    return "probes" if path in ("/healthz", "/health", "/readyz", "/metrics") else "other"
