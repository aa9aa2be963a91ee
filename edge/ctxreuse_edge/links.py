"""The device's clouds: who is asked for contexts, and who gets those that it lacks.

This is the one place where bus and runtime meet in the daemon; without clouds in the settings nothing of it is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ctxreuse.cost import CostModel, DecisionLog, LinkEstimate, Record
from ctxreuse.errors import ConfigError

if TYPE_CHECKING:
    from ctxreuse.bus.cards import Cards
    from ctxreuse.bus.remote import Clouds
    from ctxreuse.bus.serve_quarantine import Quarantine
    from ctxreuse.bus.sync import Sync
    from ctxreuse.bus.zmqio import BusClient
    from ctxreuse.config import BusConfig
    from ctxreuse.metrics import Metrics
    from ctxreuse.model import ModelSpace
    from ctxreuse.runtime.remote import Remote
    from ctxreuse.store import WholeStore

__all__ = ["Links"]

log = logging.getLogger(__name__)

_QUARANTINE_SECONDS = 24 * 3600.0


class _Counted(DecisionLog):
    """A log of decisions that counts them, too."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics

    def add(self, record: Record) -> None:
        super().add(record)
        self._metrics.add("ctxreuse_decisions_total", 1, record.took)
        if record.predicted is not None:
            self._metrics.add("ctxreuse_decision_predicted_seconds_total", record.predicted, record.took)
            self._metrics.add("ctxreuse_decision_real_seconds_total", record.real, record.took)


class Links:
    """The clouds of one device, and what its own work costs. Any thread may call; a cloud that is away raises nothing.

    ``cost`` is for the runtime, and ``remote`` once `connect` was called (None without clouds). What was learnt of
    costs is kept in ``folder`` between starts.
    """

    def __init__(self, metrics: Metrics, folder: Path) -> None:
        self.cost = CostModel(log=_Counted(metrics))
        self.remote: Remote | None = None
        self._file = folder / "cost.bin"
        with contextlib.suppress(OSError):
            self.cost.restore(self._file.read_bytes())
        self._links: list[tuple[BusClient, LinkEstimate]] = []
        self._sync: Sync | None = None
        self._clouds: Clouds | None = None
        self._quarantine: Quarantine | None = None
        self._cards: Cards | None = None
        self._on_card: Callable[[], None] = lambda: None
        self._space: ModelSpace | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._metrics, self._folder = metrics, folder

    def connect(
        self, bus: BusConfig, space: ModelSpace, *, lossy: str = "", on_card: Callable[[], None] = lambda: None
    ) -> None:
        """Start the links, which come up by themselves. While a model loads their first round trips would be seconds.

        ``lossy``: the level that requests allow by default; if there is one, clouds are asked at once for cards that
        lack here. ``on_card`` is called, in another thread, whenever one has come.

        Raises ConfigError for settings that cannot work, such as a plain link beyond loopback.
        """
        if not bus.clouds:
            return
        try:
            from ctxreuse.bus.auth import KeyPair, public_key
            from ctxreuse.bus.remote import Clouds
            from ctxreuse.bus.serve_quarantine import Quarantine
            from ctxreuse.bus.session import Limits
            from ctxreuse.bus.wire import Terms
            from ctxreuse.bus.zmqio import BusClient
            from ctxreuse.codec import Shelf
        except ModuleNotFoundError as error:
            raise ConfigError(f"links need {error.name}", fix="Run: pip install 'ctxreuse[edge]'") from error
        keys = KeyPair.read(bus.key_file) if bus.key_file else None
        heartbeat = int(bus.heartbeat * 1000)
        terms = Terms(max_payload=bus.max_payload, heartbeat_ms=heartbeat, silence_ms=5 * heartbeat)
        for cloud in bus.clouds:
            estimate = LinkEstimate()
            # A link without a server key is plain, even where this node has a key for other links.
            server = public_key(cloud.server_key) if cloud.server_key else None
            link = BusClient(
                cloud.endpoint,
                keys=keys if server is not None else None,
                server_key=server,
                name=cloud.name or cloud.endpoint,
                models=(space,),
                limits=Limits(terms=terms),
                insecure=bus.insecure,
                estimate=estimate,
            )
            self._links.append((link, estimate))
        self._quarantine = Quarantine(self._folder / "quarantine.json", seconds=_QUARANTINE_SECONDS, clock=time.time)
        shelf = Shelf()
        self._clouds = Clouds(self._links, quarantine=self._quarantine, seconds=self._seconds, shelf=shelf)
        self._space, self._on_card = space, on_card
        if lossy:
            self.want_cards()
        self.remote = self._clouds
        self._metrics.watch(self._figures)

    def want_cards(self) -> None:
        """From now on fetch the cards that clouds encode with: some request allows lossy blocks. Idempotent."""
        with self._lock:
            if self._cards is not None or self._space is None or not self._links or self._closed:
                return
            from ctxreuse.bus.cards import Cards
            from ctxreuse.codec import Shelf

            links = [link for link, _ in self._links]
            self._cards = Cards(links, self._space, Shelf(), on_lie=self._lied, on_card=self._on_card)

    def _lied(self, name: str, reason: str) -> None:
        if self._quarantine is not None:
            self._quarantine.add(name, reason)

    def _seconds(self, first: int, last: int) -> float | None:
        return self.cost.prefill.seconds(last - first, first)

    def give(self, store: WholeStore, *, rate: float, busy: Callable[[], bool]) -> None:
        """From now on give the clouds what they lack of ``store`` while the device is not ``busy``."""
        if not self._links:
            return
        from ctxreuse.bus.sync import Sync

        def count(_: str, blocks: int, nbytes: int) -> None:
            self._metrics.add("ctxreuse_sync_blocks_total", blocks)

        links = [link for link, _ in self._links]
        self._sync = Sync(store, links, busy=busy, rate=rate, quarantine=self._quarantine, on_sent=count)
        self._sync.start()

    def status(self) -> list[dict[str, Any]]:
        """One entry a cloud: name, endpoint, state and why, and figures."""
        held = {} if self._clouds is None else self._clouds.quarantine.names()
        return [
            msgspec.to_builtins(link.stats())
            | {"endpoint": link.endpoint, "bandwidth": estimate.bandwidth}
            | {"quarantined": held[link.name].reason if link.name in held else ""}
            for link, estimate in self._links
        ]

    def sync(self) -> dict[str, Any]:
        """Give the clouds now what they lack; says what was given and what they still lack."""
        if self._sync is None:
            return {"enabled": False, "links": []}
        found: dict[str, Any] = msgspec.to_builtins(self._sync.sync_now())
        return {"enabled": True, **found}

    def _figures(self) -> None:
        metrics = self._metrics
        every = [(link.stats(), estimate) for link, estimate in self._links]
        for state in ("up", "down", "refused"):
            metrics.set("ctxreuse_links", sum(stats.state == state for stats, _ in every), state)
        up = [(stats, estimate) for stats, estimate in every if stats.state == "up"]
        metrics.set("ctxreuse_link_rtt_seconds", min((stats.rtt or 0.0 for stats, _ in up), default=0.0))
        metrics.set("ctxreuse_link_bytes_per_second", max((estimate.bandwidth for _, estimate in up), default=0.0))
        for direction in ("in", "out"):
            total = sum(getattr(stats, f"bytes_{direction}") for stats, _ in every)
            metrics.total("ctxreuse_link_bytes_total", total, direction)
        if self._quarantine is not None:
            metrics.set("ctxreuse_peers_quarantined", len(self._quarantine.names()))
        if self._cards is not None:
            for how in ("taken", "refused"):
                metrics.total("ctxreuse_cards_total", getattr(self._cards, how), how)
        metrics.total("ctxreuse_link_reconnects_total", sum(max(stats.up - 1, 0) for stats, _ in every))
        metrics.total("ctxreuse_transfer_resumes_total", sum(stats.resumes for stats, _ in every))
        metrics.total("ctxreuse_transfer_duplicate_bytes_total", sum(stats.duplicates for stats, _ in every))

    def stop(self) -> None:
        """End all links: nothing more is given or fetched, and the store may close after this. What was on its way goes
        on from there next time. Idempotent."""
        if self._sync is not None:
            self._sync.stop()
        with self._lock:
            self._closed = True
        for link, _ in self._links:
            link.close()
        if self._cards is not None:
            self._cards.close()
        # Last: until its link is closed, it waits for what a slow one takes.
        if self._sync is not None:
            self._sync.close()

    def close(self) -> None:
        """End all links, and keep what was learnt."""
        self.stop()
        fresh = self._file.with_name(self._file.name + ".new")
        try:
            fresh.write_bytes(self.cost.dump())
            fresh.replace(self._file)
        except OSError as error:
            log.warning("what was learnt of costs is forgotten: %s", error)
