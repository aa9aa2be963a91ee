"""The links of a device to its clouds, from which it fetches contexts and to which it sends its own.

The only place in the daemon where bus and runtime meet; without clouds in the settings nothing of the bus is imported.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ctxreuse.bus.transport import ClientOptions
from ctxreuse.cost import CostModel, DecisionLog, DecisionRecord, LinkEstimate
from ctxreuse.errors import ConfigError
from ctxreuse.peer.sync.sync import SyncOptions
from ctxreuse.private import write_private

if TYPE_CHECKING:
    from ctxreuse.bus.remote import Remote, Verifier
    from ctxreuse.bus.transport import BusClient
    from ctxreuse.config import BusConfig
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.metrics import Metrics
    from ctxreuse.peer.fetch.clouds import CloudPool
    from ctxreuse.peer.fetch.profiles import ProfileFetcher
    from ctxreuse.peer.quarantine import Quarantine
    from ctxreuse.peer.sync.deletions import CloudDeletions
    from ctxreuse.peer.sync.sync import Sync
    from ctxreuse.store import Store

__all__ = ["CloudLinks"]

log = logging.getLogger(__name__)

_QUARANTINE_SECONDS = 24 * 3600.0


class _Counted(DecisionLog):
    """A log of decisions that also counts them."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics

    def add(self, record: DecisionRecord) -> None:
        super().add(record)
        self._metrics.add("ctxreuse_decisions_total", 1, record.took)
        if record.predicted is not None:
            self._metrics.add("ctxreuse_decision_predicted_seconds_total", record.predicted, record.took)
            self._metrics.add("ctxreuse_decision_real_seconds_total", record.real, record.took)


class CloudLinks:
    """The clouds of one device, and its measured costs. Thread-safe; an unreachable cloud raises nothing.

    ``cost``, ``remote`` and ``verifier`` (None without clouds, or before `connect`) are for the runtime. Costs are in
    ``folder``.
    """

    def __init__(self, metrics: Metrics, folder: Path) -> None:
        self.cost = CostModel(log=_Counted(metrics))
        self.remote: Remote | None = None
        self.verifier: Verifier | None = None
        self._file = folder / "cost.bin"
        with contextlib.suppress(OSError):
            self.cost.restore(self._file.read_bytes())
        self._saved = self.cost.dump()
        self._links: list[tuple[BusClient, LinkEstimate]] = []
        self._sync: Sync | None = None
        self._clouds: CloudPool | None = None
        self._quarantine: Quarantine | None = None
        #: What clouds are still to delete; None without clouds.
        self.deletions: CloudDeletions | None = None
        self._profiles: ProfileFetcher | None = None
        self._on_profile: Callable[[], None] = lambda: None
        self._space: ModelSpace | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._metrics, self._folder = metrics, folder

    def connect(
        self, bus: BusConfig, space: ModelSpace, *, lossy: bool = False, on_profile: Callable[[], None] = lambda: None
    ) -> None:
        """Start the links, which connect by themselves. Call it after loading the model, which would delay round trips.

        ``lossy``: requests allow lossy KV by default, so `fetch_profiles` at once. ``on_profile`` is called, in another
        thread, when a calibration profile has arrived.

        Raises ConfigError for invalid settings, such as an unencrypted link beyond loopback.
        """
        if not bus.clouds:
            return
        try:
            from ctxreuse.bus.auth.curve import KeyPair, public_key
            from ctxreuse.bus.protocol.messages import Terms
            from ctxreuse.bus.protocol.session import Limits
            from ctxreuse.bus.transport import BusClient
            from ctxreuse.codec import ProfileStore
            from ctxreuse.peer.fetch.clouds import CloudPool
            from ctxreuse.peer.fetch.verifiers import CloudVerifiers
            from ctxreuse.peer.quarantine import Quarantine
            from ctxreuse.peer.sync.deletions import CloudDeletions
        except ModuleNotFoundError as error:
            raise ConfigError(f"links need {error.name}", fix="Run: pip install 'ctxreuse[edge]'") from error
        keys = KeyPair.read(bus.key_file) if bus.key_file else None
        heartbeat = int(bus.heartbeat * 1000)
        terms = Terms(max_payload=bus.max_payload, heartbeat_ms=heartbeat, silence_ms=5 * heartbeat)
        for cloud in bus.clouds:
            estimate = LinkEstimate()
            # A link without a server key is unencrypted, even where this node has a key for other links.
            server = public_key(cloud.server_key) if cloud.server_key else None
            link = BusClient(
                cloud.endpoint,
                ClientOptions(
                    keys=keys if server is not None else None,
                    server_key=server,
                    name=cloud.name or cloud.endpoint,
                    models=(space,),
                    limits=Limits(terms=terms),
                    insecure=bus.insecure,
                    estimate=estimate,
                ),
            )
            self._links.append((link, estimate))
        self._quarantine = Quarantine(self._folder / "quarantine.json", seconds=_QUARANTINE_SECONDS)
        self._clouds = CloudPool(
            self._links, quarantine=self._quarantine, seconds=self._seconds, profiles=ProfileStore()
        )
        self.deletions = CloudDeletions([link for link, _ in self._links], self._folder / "deletions.clouds")
        self.deletions.start()
        self._space, self._on_profile = space, on_profile
        if lossy:
            self.fetch_profiles()
        self.remote, quarantine = self._clouds, self._quarantine
        self.verifier = CloudVerifiers([link for link, _ in self._links], lambda name: quarantine.reason(name) is None)
        self._metrics.watch(self._update_metrics)

    def fetch_profiles(self) -> None:
        """Start fetching the calibration profiles that clouds encode lossy blocks with. Idempotent."""
        with self._lock:
            if self._profiles is not None or self._space is None or not self._links or self._closed:
                return
            from ctxreuse.codec import ProfileStore
            from ctxreuse.peer.fetch.profiles import ProfileFetcher

            links = [link for link, _ in self._links]
            self._profiles = ProfileFetcher(
                links, self._space, ProfileStore(), on_forged=self._quarantine_peer, on_profile=self._on_profile
            )

    def _quarantine_peer(self, name: str, reason: str) -> None:
        if self._quarantine is not None:
            self._quarantine.add(name, reason)

    def _seconds(self, first: int, last: int) -> float | None:
        return self.cost.prefill.seconds(last - first, first)

    def start_sync(
        self, store: Store, *, rate: float, busy: Callable[[], bool], on_withdrawn: Callable[[], None]
    ) -> None:
        """Start sending the clouds the blocks they miss, whenever the device is not ``busy``.

        ``on_withdrawn``: called after blocks of a cloud were dropped that are not to be used any more.
        """
        if not self._links:
            return
        from ctxreuse.peer.sync.sync import Sync

        def count(_: str, blocks: int, nbytes: int) -> None:
            self._metrics.add("ctxreuse_sync_blocks_total", blocks)

        links = [link for link, _ in self._links]
        self._sync = Sync(
            store,
            links,
            SyncOptions(busy=busy, rate=rate, quarantine=self._quarantine, on_sent=count, on_withdrawn=on_withdrawn),
        )
        self._sync.start()

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each cloud as plain values for JSON."""
        bad = {} if self._clouds is None else self._clouds.quarantine.names()
        return [
            msgspec.to_builtins(link.stats())
            | {"endpoint": link.endpoint, "bandwidth": estimate.bandwidth}
            | {"quarantined": bad[link.name].reason if link.name in bad else ""}
            for link, estimate in self._links
        ]

    def rows(self) -> dict[str, list[Any]]:
        """Return each cloud for the page, see `ctxreuse_edge.page`."""
        pending = {one.name: one for one in self._sync.status().links} if self._sync is not None else {}
        found: dict[str, list[Any]] = {}
        for one, (link, _) in zip(self.status(), self._links):
            sync = pending.get(link.name)
            found[link.name] = [
                one["state"], one["reason"] or one["quarantined"], one["rtt"], one["bandwidth"], one["bytes_in"],
                one["bytes_out"], max(one["up"] - 1, 0), one["announced"], sync.pending_blocks if sync else 0,
                sync.sent_blocks if sync else 0, link.transfers(),
            ]  # fmt: skip
        return found

    def sync(self) -> dict[str, Any]:
        """Send the clouds the blocks they miss, now; returns what was sent and what is pending."""
        if self._sync is None:
            return {"enabled": False, "links": []}
        found: dict[str, Any] = msgspec.to_builtins(self._sync.sync_now())
        return {"enabled": True, **found}

    def _update_metrics(self) -> None:
        metrics = self._metrics
        links = [(link.stats(), estimate) for link, estimate in self._links]
        for state in ("up", "down", "refused"):
            metrics.set("ctxreuse_links", sum(stats.state == state for stats, _ in links), state)
        up = [(stats, estimate) for stats, estimate in links if stats.state == "up"]
        metrics.set("ctxreuse_link_rtt_seconds", min((stats.rtt or 0.0 for stats, _ in up), default=0.0))
        metrics.set("ctxreuse_link_bytes_per_second", max((estimate.bandwidth for _, estimate in up), default=0.0))
        metrics.total("ctxreuse_link_bytes_total", sum(stats.bytes_in for stats, _ in links), "in")
        metrics.total("ctxreuse_link_bytes_total", sum(stats.bytes_out for stats, _ in links), "out")
        if self._quarantine is not None:
            metrics.set("ctxreuse_peers_quarantined", len(self._quarantine.names()))
        if self._profiles is not None:
            metrics.total("ctxreuse_calibration_profiles_total", self._profiles.taken, "taken")
            metrics.total("ctxreuse_calibration_profiles_total", self._profiles.refused, "refused")
        metrics.total("ctxreuse_link_reconnects_total", sum(max(stats.up - 1, 0) for stats, _ in links))
        metrics.total("ctxreuse_transfer_resumes_total", sum(stats.resumes for stats, _ in links))
        metrics.total("ctxreuse_transfer_duplicate_bytes_total", sum(stats.duplicates for stats, _ in links))

    def stop(self) -> None:
        """End all links, after which the store may close; transfers resume next time. Idempotent."""
        if self._sync is not None:
            self._sync.stop()
        with self._lock:
            self._closed = True
        for link, _ in self._links:
            link.close()
        if self._profiles is not None:
            self._profiles.close()
        if self.deletions is not None:
            self.deletions.close()
        # Last: it waits for its link.
        if self._sync is not None:
            self._sync.close()

    def close(self) -> None:
        """End all links and save the costs."""
        self.stop()
        self.save_costs()

    def save_costs(self) -> None:
        """Write the measured costs to ``cost.bin`` if they have changed; other programs may read it (`replay`)."""
        costs = self.cost.dump()
        if costs == self._saved:
            return
        self._saved = costs  # a failing disk is tried again with the next measurement
        try:
            write_private(self._file, costs)
        except OSError as error:
            log.warning("measured costs could not be saved: %s", error)
