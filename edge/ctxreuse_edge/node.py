"""The node of a device: store, engine, runtime, links and named contexts, opened and closed in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import Protocol, runtime_checkable

import msgspec
import psutil

from ctxreuse.clock import SteadyClock
from ctxreuse.codec import Codec
from ctxreuse.config import EngineConfig, Settings
from ctxreuse.embed import Embedder, open_embedder
from ctxreuse.engines import Engine, open_draft_engine, open_engine
from ctxreuse.engines.process import ChildEngine, EngineStart
from ctxreuse.errors import ConfigError
from ctxreuse.lab.recorder import open_recorder
from ctxreuse.metrics import Metrics, watch_store
from ctxreuse.private import make_private_folder
from ctxreuse.reuse import parse_budget
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.steps.passes import MOST
from ctxreuse.store import Ledger, open_store
from ctxreuse.store.idle_compaction import IdleCompaction
from ctxreuse.store.policy.states import StatePolicy
from ctxreuse.store.prefix_pins import PrefixPins
from ctxreuse.units import parse_duration
from ctxreuse.why import FILE, RequestLog
from ctxreuse_edge.contexts import NamedContexts
from ctxreuse_edge.forget import Forgetter
from ctxreuse_edge.idle import IdleTasks
from ctxreuse_edge.links import CloudLinks
from ctxreuse_edge.models import ServedModel, ServedModels, model_name, parse_keep_alive
from ctxreuse_edge.responses import StoredResponses
from ctxreuse_edge.retention import Retention
from ctxreuse_edge.steps import step_rule
from ctxreuse_edge.worker import RequestPool

__all__ = ["EdgeNode"]

log = logging.getLogger(__name__)

# Answers of one caller that advance side by side, in shared passes; whether they fit in memory is asked of each prompt.
# Two, however few may wait.
_RUNNING, _LEAST = MOST, 2


@runtime_checkable
class _Recodable(Protocol):
    codec: Codec | None


class EdgeNode:
    """Everything behind the HTTP server; all parts but ``settings`` and ``metrics`` exist only while it is `opened`."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.metrics = settings, Metrics()
        #: The engine, where it runs in a process of its own.
        self.child: ChildEngine | None = None

    @contextlib.asynccontextmanager
    async def opened(self, engine: Engine | EngineStart | None = None) -> AsyncIterator[None]:
        """Open everything; on exit close it in the opposite order. ``engine``: in place of that of the settings, or
        that one, being started."""
        stack = ExitStack()
        try:
            await asyncio.to_thread(self._open, stack, engine)
            yield
        finally:
            await asyncio.to_thread(stack.close)

    def _open(self, stack: ExitStack, engine: Engine | EngineStart | None) -> None:
        settings, edge, metrics = self.settings, self.settings.edge, self.metrics
        self.since, folder = time.time(), settings.store.folder()
        make_private_folder(folder.parent)
        if isinstance(engine, EngineStart):
            stack.callback(engine.close)
        # The store first: another daemon that owns it must be noticed before a model has been loaded for seconds.
        self.ledger = Ledger.open(folder)
        stack.callback(self.ledger.close)
        self.store = store = open_store(settings.store, memory_fallback=True)
        stack.callback(store.close)
        self.pins = PrefixPins(store, folder / "prefixes.json")
        stack.callback(self.pins.close)
        if isinstance(engine, EngineStart):
            engine = engine.opened()
        elif engine is None:
            engine = open_engine(settings.engine, isolate=edge.isolate)
        self.child = engine if isinstance(engine, ChildEngine) else None
        if self.child is not None:
            stack.callback(self.child.close)
        draft = open_draft_engine(settings.engine.draft_model, settings.engine, isolate=edge.isolate)
        if isinstance(draft, ChildEngine):
            stack.callback(draft.close)
        space = engine.space
        recorder = None
        if edge.record:
            recorder = open_recorder(
                edge.record, edge.record_bytes, block_tokens=space.block_tokens, token_bytes=space.token_nbytes
            )
            stack.callback(recorder.close)
        self.links = links = CloudLinks(metrics, folder)
        stack.callback(links.close)
        requests = RequestLog(
            folder / FILE if store.disk is not None else None, texts=edge.request_log == "text"
        ).open()
        stack.callback(requests.close)
        self.runtime = runtime = Runtime(
            engine,
            store,
            RuntimeOptions(
                context_cache_bytes=edge.context_cache_bytes,
                recompute=parse_budget(settings.engine.recompute_budget),
                stall=settings.engine.stall,
                states=StatePolicy(replay=settings.store.replay),
                cost=links.cost,
                metrics=metrics,
                requests=requests,
                recorder=recorder,
                available_memory=lambda: psutil.virtual_memory().available,
                speculate=settings.engine.speculate,
                draft=draft,
                verify=edge.verify != "off" and bool(settings.bus.clouds),
                exits=settings.engine.exits,
                drafts=folder if store.disk is not None else None,
            ),
        )
        stack.callback(runtime.close)
        if settings.bus.clouds and not len(links.cost.prefill):
            runtime.calibrate()
        links.connect(settings.bus, space, lossy=bool(edge.max_kl), on_profile=self._use_newest_profile)
        runtime.connect(links.remote)
        verifier = links.verifier if edge.verify != "off" else None
        runtime.let_verify(verifier, step_rule(edge), in_steps=edge.verify == "steps")
        others = stack.enter_context(ExitStack())  # models that requests open; they outlive the pool
        self.pool = pool = RequestPool(
            running=max(_LEAST, min(_RUNNING, edge.max_waiting // 2)), limit=edge.max_waiting
        )
        stack.callback(pool.close)
        # Before the pool, which waits for work that may wait for a link.
        stack.callback(links.stop)
        if edge.sync:
            links.start_sync(store, rate=edge.sync_rate, busy=self._busy, on_withdrawn=runtime.forget_texts)
        self.models = self._served(stack, others)
        self.contexts = NamedContexts(self.ledger, runtime, store, folder / "pins.json")
        self.forget = Forgetter(self.ledger, store, self.models, self.contexts, links.deletions)
        self.forget.resume()
        self.pins.start()
        self.responses = StoredResponses(
            self.ledger,
            self.contexts,
            self.forget.session,
            seconds=parse_keep_alive(edge.keep_responses),
            clock=SteadyClock().now,
        )
        compaction = IdleCompaction(self.ledger.deleted_since, self.forget.compact, self._busy, time.time)
        retention = Retention(self.forget, parse_duration(edge.retention) if edge.retention else None)

        def daily() -> None:
            retention.round()
            self.responses.expire()
            compaction.round()

        def prepare() -> None:  # else the first request with tools would wait for the vocabulary
            self.models.while_loaded(self.models.first, runtime.grammars.warm)

        idle = IdleTasks(runtime, self._busy, folder / "pauses.bin", links.save_costs, daily, prepare)
        stack.callback(idle.close)
        idle.watch(metrics)
        disk = store.disk
        watch_store(
            metrics, store.stats, disk.stats if disk is not None else None, lambda: runtime.context_cache.nbytes
        )
        metrics.watch(lambda: metrics.set("ctxreuse_http_waiting_requests", pool.active))
        seconds = time.time() - self.since
        log.info("opened", extra={"store": str(folder), "model": self.models.first.name.id, "seconds": seconds})

    def _served(self, stack: ExitStack, others: ExitStack) -> ServedModels:
        """The models of the settings; the first is open."""
        settings, edge = self.settings, self.settings.edge
        served = [ServedModel(model_name(settings.engine.model), settings.engine.model, lambda: self.runtime)]
        for row in edge.models:
            config = msgspec.structs.replace(settings.engine, model=row.model, engine=row.engine, draft_model="")
            name = model_name(row.model, row.name)
            served.append(ServedModel(name, row.model, partial(self._open_other, others, config)))
        names = [one.name.id for one in served]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"two models have one name: {', '.join(names)}", where="edge.models", fix="Give each its own `name`"
            )
        found = ServedModels(served, keep_alive=parse_keep_alive(edge.keep_alive), budget=edge.models_bytes)
        found.first.load(time.monotonic)
        found.start()
        stack.callback(found.close)
        return found

    def _open_other(self, stack: ExitStack, config: EngineConfig) -> Runtime:
        """Open a further model over the same store; clouds and named contexts are the first one's."""
        engine = open_engine(config, isolate=self.settings.edge.isolate)
        runtime = Runtime(
            engine,
            self.store,
            replace(self.runtime.options, cost=None, recorder=None, remote=None, verify=False, draft=None),
        )
        if isinstance(engine, ChildEngine):
            stack.callback(engine.close)
        stack.callback(runtime.close)
        return runtime

    def _busy(self) -> bool:
        return self.pool.active > 0

    @cached_property
    def embedder(self) -> Embedder:
        """Makes vectors of texts; opened at its first use. Raises ConfigError without the extra ``embed``."""
        return open_embedder()

    @property
    def failing(self) -> str:
        """Why no request can be answered; "": they can."""
        return self.child.failing if self.child is not None else ""

    def _use_newest_profile(self) -> None:
        """After a calibration profile has arrived: let engine and store use the newest."""
        engine, codec = self.runtime.engine, Codec.open(self.runtime.engine.space)
        if isinstance(engine, _Recodable):
            engine.codec = codec
        self.store.register_codec(codec)
