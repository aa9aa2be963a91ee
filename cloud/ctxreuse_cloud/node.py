"""The node: the store that it owns, its engine processes, its bus, and the proxy, opened and closed in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import Gauge

import ctxreuse
from ctxreuse.bus.allow import ALLOW_FILE, keys_folder
from ctxreuse.bus.auth import LOCAL, ServerAuth
from ctxreuse.bus.serve import StoreService
from ctxreuse.bus.serve_pack import Packer
from ctxreuse.bus.session import Limits
from ctxreuse.bus.wire import Terms
from ctxreuse.bus.zmqio import BusServer
from ctxreuse.bus.zmqio_socket import check_endpoint
from ctxreuse.config import Settings
from ctxreuse.daemon.front import is_loopback
from ctxreuse.errors import ConfigError
from ctxreuse.lab.recorder import open_recorder
from ctxreuse.metrics import Metrics, watch_store
from ctxreuse.metrics.registry import how_kept
from ctxreuse.model import ModelSpace
from ctxreuse.store import TieredStore, open_store
from ctxreuse_cloud.proxy.backends import Backends, connections
from ctxreuse_cloud.proxy.counts import ProxyCounts
from ctxreuse_cloud.proxy.health import Looking
from ctxreuse_cloud.proxy.pauses import PauseBook
from ctxreuse_cloud.proxy.proxy import Proxy
from ctxreuse_cloud.proxy.tenants import KeyFile, Tenants
from ctxreuse_cloud.proxy.why import FILE, AskedBook
from ctxreuse_cloud.workers.audit import WorkerAudit
from ctxreuse_cloud.workers.crew import Workers

__all__ = ["Node", "tenants_of"]

log = logging.getLogger(__name__)

# How long the bus waits for models to be loaded: peers learn in their welcome what is computed here.
_LOADING = 120.0


def tenants_of(settings: Settings) -> Tenants:
    """Who may use the proxy. Raises ConfigError where everybody could, from other machines."""
    cloud = settings.cloud
    if not cloud.keys_file:
        if cloud.backends and not is_loopback(cloud.host):
            raise ConfigError(
                "beyond loopback requests must bear keys",
                where=f"cloud.host = {cloud.host}",
                fix="Run `ctxreuse-cloud tenants add NAME` and set cloud.keys_file",
            )
        return Tenants(None)
    return Tenants(KeyFile(Path(cloud.keys_file).expanduser()))


class Node:
    """Everything behind the HTTP server. What is wrong with the settings is raised by the constructor (ConfigError);
    ``opened`` does the rest. One event loop owns it; `status` and `metrics` may be read from any thread."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self.settings, self._clock = settings, clock
        self.metrics = Metrics()
        self.tenants = tenants_of(settings)
        self.backends = Backends(settings.cloud.backends)
        self._counts = ProxyCounts(self.metrics.registry, self.backends)
        self._auth = _auth(settings)
        # What cannot be bound is said now, not when models have been loaded.
        check_endpoint(settings.bus.bind, secured=self._auth is not None, insecure=settings.bus.insecure)
        self.proxy: Proxy | None = None
        self._store: TieredStore | None = None
        self._workers: Workers | None = None
        self._service: StoreService | None = None
        self._bus: BusServer | None = None
        self._since = clock()

    def not_ready(self) -> str:
        """Why requests should go elsewhere; "" if they need not."""
        if self._bus is None or self.proxy is None:
            return "starting"
        if self.backends.all and not self.backends.healthy:
            return "no backend is well"
        return ""

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open everything, and close it in the opposite order: first no more peers, then no more computing, and last
        the store, when all that was given to it is on disk."""
        async with AsyncExitStack() as stack:
            await self._open_proxy(stack)
            here = ExitStack()  # closed in a thread: the event loop still has answers to pass on
            stack.push_async_callback(asyncio.to_thread, here.close)
            await asyncio.to_thread(self._open_store, here)
            yield
            log.info("closing", extra={"peers": len(self._bus.peers()) if self._bus else 0})

    async def _open_proxy(self, stack: AsyncExitStack) -> None:
        cloud = self.settings.cloud
        pool = await stack.enter_async_context(connections(cloud.connect, cloud.silence))
        recorder = open_recorder(cloud.record, cloud.record_bytes, unit="bytes") if cloud.record else None
        if recorder is not None:
            stack.push_async_callback(asyncio.to_thread, recorder.close)
        asked = AskedBook()
        if cloud.backends:
            cloud.folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            asked = AskedBook(cloud.folder() / FILE)
        stack.callback(asked.close)
        book = PauseBook(self.metrics.registry)
        self.proxy = Proxy(
            cloud, self.backends, self.tenants, pool, self._counts, recorder=recorder, asked=asked, pauses=book
        )
        looking = Looking(pool, self.backends, self.tenants, cloud.health)
        await looking.once()
        task = asyncio.create_task(looking.run())

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        stack.push_async_callback(end)

    def _open_store(self, stack: ExitStack) -> None:
        settings, cloud = self.settings, self.settings.cloud
        folder = cloud.folder()
        store = stack.enter_context(
            open_store(
                folder,
                capacity=cloud.store_bytes,
                host_bytes=settings.store.host_bytes,
                policy=settings.store.policy,
                level=settings.store.level,
                demote=settings.store.demote,
            )
        )
        self._store = store
        watch_store(self.metrics, store.stats, store.disk.stats if store.disk else None)
        workers = Workers(
            cloud.prefill_workers, settings.engine, settings.log, store=str(folder), on_open=self._peers_anew
        )
        self._workers = workers
        workers.start()
        stack.callback(workers.close)
        auth = self._auth
        packer = Packer()
        stack.callback(packer.close)
        self._service = StoreService(
            store,
            folder,
            tenant_of=auth.tenant if auth is not None else _local,
            tenants=[entry.tenant for entry in auth.allow.entries] if auth is not None else [LOCAL],
            prefiller=workers if cloud.prefill_workers else None,
            audit=WorkerAudit(workers) if cloud.prefill_workers else None,
            packer=packer,
        )
        stack.callback(self._service.close)
        # Before the service, too: an audit under way waits for them.
        stack.callback(workers.close)
        workers.settle(_LOADING)
        bus, heartbeat = settings.bus, int(settings.bus.heartbeat * 1000)
        terms = Terms(max_payload=bus.max_payload, heartbeat_ms=heartbeat, silence_ms=5 * heartbeat)
        self._bus = BusServer(self._service, bus.bind, auth=auth, limits=Limits(terms=terms), insecure=bus.insecure)
        self._bus.start()
        stack.callback(self._bus.close, cloud.drain)
        self._watch(workers, self._bus)
        log.info("the bus listens", extra={"endpoint": self._bus.endpoint, "secured": auth is not None})

    def _peers_anew(self, space: ModelSpace) -> None:
        """A model came to be served after peers were told what is computed here: let them ask again."""
        log.info("contexts are computed here", extra={"space": space.digest.hex()[:16], "model": space.architecture})
        if self._bus is not None:
            for user in {peer.user for peer in self._bus.peers()}:
                self._bus.drop(user, "another model is served now")

    def _watch(self, workers: Workers, bus: BusServer) -> None:
        registry = self.metrics.registry
        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("ctxreuse_bus_peers", "Peers connected to the bus.", lambda: float(len(bus.peers()))),
            ("ctxreuse_workers_up", "Engine processes that are up.", lambda: float(workers.up)),
            ("ctxreuse_workers_waiting", "Contexts that wait to be computed.", lambda: float(workers.waiting)),
        )
        for name, about, read in gauges:
            Gauge(name, about, registry=registry).set_function(read)
        self.metrics.watch(self._figures)

    def _figures(self) -> None:
        service, metrics = self._service, self.metrics
        if service is None:
            return
        metrics.set("ctxreuse_peers_quarantined", len(service.quarantine.names()))
        counts = dict(service.counts)
        for kind in ("served", "taken"):
            metrics.total(f"ctxreuse_{kind}_blocks_total", counts.get(kind, 0))
        for how in ("computed", "shared"):
            metrics.total("ctxreuse_prefills_total", counts.get(how, 0), how)
        if service.packer is not None:
            packed = dict(service.packer.counts)
            for name, (items, _) in packed.items():
                metrics.total("ctxreuse_sent_blocks_total", items, how_kept(name))
            metrics.total("ctxreuse_link_saved_bytes_total", sum(saved for _, saved in packed.values()))
        for what, n in counts.items():
            kind, _, reason = what.partition(":")
            if kind == "refused":
                metrics.total("ctxreuse_given_refused_blocks_total", n, reason)

    def status(self) -> dict[str, Any]:
        """How the node stands, as plain values for JSON."""
        store, workers, service, bus = self._store, self._workers, self._service, self._bus
        folder = self.settings.cloud.folder()
        return {
            "version": ctxreuse.__version__,
            "pid": os.getpid(),
            "seconds": self._clock() - self._since,
            "state": self.not_ready() or "ready",
            "bus": {"endpoint": bus.endpoint if bus else "", "secured": self._auth is not None},
            "peers": [msgspec.structs.asdict(peer) | {"node": peer.node.hex()} for peer in bus.peers()] if bus else [],
            "transfers": dict(service.counts) if service else {},
            "levels": {
                name: {"items": items, "saved_bytes": saved}
                for name, (items, saved) in (service.packer.counts if service and service.packer else {}).items()
            },
            "store": {"path": str(folder), "stats": msgspec.to_builtins(store.stats()) if store else {}},
            "workers": {
                "processes": [msgspec.to_builtins(standing) for standing in workers.standing()] if workers else [],
                "waiting": workers.waiting if workers else 0,
                "spaces": {
                    digest.hex(): space.architecture for digest, space in (workers.spaces.items() if workers else ())
                },
            },
            "backends": [msgspec.to_builtins(backend.standing()) for backend in self.backends.all],
            "requests": {"running": self.proxy.running if self.proxy else 0, "most": self.settings.cloud.max_waiting},
        }


def _local(user: str) -> str | None:
    return LOCAL if user == LOCAL else None


def _auth(settings: Settings) -> ServerAuth | None:
    bus = settings.bus
    if not bus.key_file:
        return None
    return ServerAuth.open(bus.key_file, bus.allow_file or keys_folder() / ALLOW_FILE)
