"""The node of a cloud: store, engine processes, bus and proxy, opened and closed in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import Gauge

import ctxreuse
from ctxreuse.bus.transport import BusServer
from ctxreuse.bus.transport.sockets import check_endpoint
from ctxreuse.config import Settings
from ctxreuse.config.hosts import is_loopback
from ctxreuse.daemon.bodies import BodyBudget
from ctxreuse.daemon.key_file import KeyFile
from ctxreuse.errors import ConfigError
from ctxreuse.identity.model import ModelSpace
from ctxreuse.kernels.dispatch import native as _native
from ctxreuse.lab.recorder import open_recorder
from ctxreuse.metrics import Metrics, watch_store
from ctxreuse.metrics.registry import level_label
from ctxreuse.peer.serve.audit import StoreAudit
from ctxreuse.peer.serve.encoder import BlockEncoder
from ctxreuse.peer.serve.service import StoreService
from ctxreuse.private import make_private_folder
from ctxreuse.routing import Router
from ctxreuse.runtime.fetch.audit import SPAN_TOKENS
from ctxreuse.store import TieredStore, open_store
from ctxreuse.store.idle_compaction import IdleCompaction
from ctxreuse_cloud.proxy.backends import Backends, BackendStatus, connections
from ctxreuse_cloud.proxy.counts import ProxyCounts
from ctxreuse_cloud.proxy.health import HealthChecker
from ctxreuse_cloud.proxy.kv_events import subscribe
from ctxreuse_cloud.proxy.observers import Observers
from ctxreuse_cloud.proxy.pauses import PauseTracker
from ctxreuse_cloud.proxy.proxy import Proxy
from ctxreuse_cloud.proxy.request_log import FILE, ProxyRequestLog
from ctxreuse_cloud.proxy.stored import FILE as STORED
from ctxreuse_cloud.proxy.stored import StoredObjects
from ctxreuse_cloud.proxy.tenants import Tenants
from ctxreuse_cloud.serving import open_auth, open_server, open_service
from ctxreuse_cloud.workers.audit import WorkerAudit
from ctxreuse_cloud.workers.pool import WorkerPool
from ctxreuse_cloud.workers.process import WorkerStatus

__all__ = ["CloudNode", "tenants_of"]

log = logging.getLogger(__name__)

# Seconds that the bus waits for models to load: its welcome tells peers which models compute here.
_LOADING = 120.0
# Seconds between two looks at what idle time is for, and between two times that freed memory is given back: the C
# library kept 110 MB of bodies that had 350.
_IDLE, _TRIM = 10.0, 60.0


def tenants_of(settings: Settings) -> Tenants:
    """Open the API keys of the proxy. Raises ConfigError if other machines could use it without a key."""
    cloud = settings.cloud
    if not cloud.keys_file:
        if cloud.backends and not is_loopback(cloud.host):
            raise ConfigError(
                "beyond loopback the proxy requires API keys",
                where=f"cloud.host = {cloud.host}",
                fix="Run `ctxreuse-cloud tenants add NAME` and set cloud.keys_file",
            )
        return Tenants(None)
    return Tenants(KeyFile(Path(cloud.keys_file).expanduser()))


class CloudNode:
    """Everything behind the HTTP server; owned by one event loop, `status` and ``metrics`` may be read from any thread.

    The constructor raises ConfigError for wrong settings, so that nothing is opened in vain; `opened` opens the rest.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self.settings, self._clock = settings, clock
        self.metrics = Metrics()
        self.bodies = BodyBudget(max(settings.cloud.max_bodies, 2 * settings.cloud.max_body), settings.cloud.receive)
        self.tenants = tenants_of(settings)
        priced = settings.cloud.router == "price"
        router = Router(settings.cloud.backend_tokens) if priced else None
        self.backends = Backends(settings.cloud.backends, router=router)
        self.counts = ProxyCounts(self.metrics.registry, self.backends)
        self._auth = open_auth(settings.bus)
        # Before models are loaded.
        check_endpoint(settings.bus.bind, secured=self._auth is not None, insecure=settings.bus.insecure)
        self.proxy: Proxy | None = None
        self.store: TieredStore | None = None
        self.workers: WorkerPool | None = None
        self._service: StoreService | None = None
        self.bus: BusServer | None = None
        self.since = clock()

    def not_ready(self) -> str:
        """Return why requests should go elsewhere; "": ready."""
        if self.bus is None or self.proxy is None:
            return "starting"
        if self.backends.all and not self.backends.healthy:
            return "no healthy backend"
        return ""

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open everything; on exit close the bus, the engine processes, and last the store, with all writes on disk."""
        async with AsyncExitStack() as stack:
            await self._open_proxy(stack)
            threaded = ExitStack()  # closed in a thread: the event loop still passes answers on
            stack.push_async_callback(asyncio.to_thread, threaded.close)
            await asyncio.to_thread(self._open_store, threaded)
            yield
            log.info("closing", extra={"peers": len(self.bus.peers()) if self.bus else 0})

    async def _open_proxy(self, stack: AsyncExitStack) -> None:
        cloud = self.settings.cloud
        pool = await stack.enter_async_context(connections(cloud.connect, cloud.silence))
        recorder = open_recorder(cloud.record, cloud.record_bytes, unit="bytes") if cloud.record else None
        if recorder is not None:
            stack.push_async_callback(asyncio.to_thread, recorder.close)
        make_private_folder(cloud.folder())
        requests = ProxyRequestLog(cloud.folder() / FILE if cloud.backends else None)
        stack.callback(requests.close)
        observers = Observers(self.counts, requests, PauseTracker(self.metrics.registry), recorder)
        stored = StoredObjects(cloud.folder() / STORED if cloud.backends else None)
        stack.callback(stored.close)
        self.proxy = Proxy(cloud, self.backends, self.tenants, pool, observers, self.bodies, stored)
        for backend in self.backends.all:
            if backend.events is not None:
                stack.push_async_callback(asyncio.to_thread, subscribe(backend.config, backend.events).close)
        checker = HealthChecker(pool, self.backends, cloud.health)
        await checker.once()
        task = asyncio.create_task(checker.run())

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        stack.push_async_callback(end)

    def _open_store(self, stack: ExitStack) -> None:
        settings, cloud = self.settings, self.settings.cloud
        folder = cloud.folder()
        store = stack.enter_context(
            open_store(msgspec.structs.replace(settings.store, path=str(folder), capacity=cloud.store_bytes))
        )
        self.store = store
        watch_store(self.metrics, store.stats, store.disk.stats if store.disk else None)
        workers = WorkerPool(
            cloud.prefill_workers, settings.engine, settings.log, store=str(folder), on_open=self._reconnect_peers
        )
        self.workers = workers
        workers.start()
        stack.callback(workers.close)
        auth = self._auth
        encoder = BlockEncoder()
        stack.callback(encoder.close)
        computes = cloud.prefill_workers > 0
        self._service = open_service(
            store,
            folder,
            auth,
            prefiller=workers if computes else None,
            verifier=workers if computes else None,
            audit=StoreAudit(store, WorkerAudit(workers), reach=SPAN_TOKENS) if computes else None,
            encoder=encoder,
        )
        stack.callback(self._service.close)
        # Also before the service: a running audit waits for them.
        stack.callback(workers.close)
        workers.settle(_LOADING)
        self.bus = open_server(self._service, settings.bus, auth)
        stack.callback(self.bus.close, cloud.drain)
        self._work_when_idle(stack, store, self._service)
        self._watch(workers, self.bus)
        log.info("bus listening", extra={"endpoint": self.bus.endpoint, "secured": auth is not None})

    def _work_when_idle(self, stack: ExitStack, store: TieredStore, service: StoreService) -> None:
        """Take what devices deleted out of the files, by itself and within a day; give freed memory back."""
        disk, end = store.disk, threading.Event()
        if disk is None:
            return

        def busy() -> bool:
            return self.proxy is not None and self.proxy.running > 0

        compaction = IdleCompaction(
            service.deleted.since, lambda: service.deleted.compacted(disk.compact), busy, self._clock
        )

        def work() -> None:
            trimmed = time.monotonic()
            while not end.wait(_IDLE):
                compaction.round()
                if time.monotonic() - trimmed >= _TRIM:  # busy or not, it takes some milliseconds
                    _native.trim_memory()
                    trimmed = time.monotonic()

        thread = threading.Thread(target=work, name="ctxreuse-idle", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(end.set)

    def _reconnect_peers(self, space: ModelSpace) -> None:
        """Drop peers, which connect again and learn in their welcome that this model computes here now."""
        log.info("a model is ready", extra={"space": space.digest.hex()[:16], "model": space.architecture})
        if self.bus is not None:
            for user in {peer.user for peer in self.bus.peers()}:
                self.bus.drop(user, "another model is served now")

    def _watch(self, workers: WorkerPool, bus: BusServer) -> None:
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
        metrics.total("ctxreuse_served_blocks_total", counts.get("served", 0))
        metrics.total("ctxreuse_received_blocks_total", counts.get("taken", 0))
        for how in ("computed", "shared"):
            metrics.total("ctxreuse_prefills_total", counts.get(how, 0), how)
        if service.encoder is not None:
            packed = dict(service.encoder.counts)
            for name, (items, _) in packed.items():
                metrics.total("ctxreuse_sent_blocks_total", items, level_label(name))
            metrics.total("ctxreuse_link_saved_bytes_total", sum(saved for _, saved in packed.values()))
        for what, n in counts.items():
            kind, _, reason = what.partition(":")
            if kind == "refused":
                metrics.total("ctxreuse_received_rejected_blocks_total", n, reason)

    def status(self) -> dict[str, Any]:
        """Return the state of the node as plain values for JSON."""
        store, workers, service, bus = self.store, self.workers, self._service, self.bus
        folder, limit = self.settings.cloud.folder(), self.settings.cloud.max_waiting
        return {
            "version": ctxreuse.__version__,
            "pid": os.getpid(),
            "seconds": self._clock() - self.since,
            "state": self.not_ready() or "ready",
            "bus": {"endpoint": bus.endpoint if bus else "", "secured": self._auth is not None},
            "peers": [msgspec.structs.asdict(peer) | {"node": peer.node.hex()} for peer in bus.peers()] if bus else [],
            "transfers": dict(service.counts) if service else {},
            "levels": {
                name: {"items": items, "saved_bytes": saved}
                for name, (items, saved) in (service.encoder.counts if service and service.encoder else {}).items()
            },
            "store": {"path": str(folder), "stats": store.stats().fields() if store else {}},
            "workers": {
                "processes": [_plain(status) for status in workers.status()] if workers else [],
                "waiting": workers.waiting if workers else 0,
                "spaces": {
                    digest.hex(): space.architecture for digest, space in (workers.spaces.items() if workers else ())
                },
            },
            "backends": [_plain(backend.status()) for backend in self.backends.all],
            "requests": {"running": self.proxy.running if self.proxy else 0, "limit": limit, "most": limit},
        }


def _plain(status: WorkerStatus | BackendStatus) -> dict[str, Any]:
    return {**msgspec.to_builtins(status), "said": status.error}  # its name in version 0.1.0
