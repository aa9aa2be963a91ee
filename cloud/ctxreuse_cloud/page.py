"""What the page of a sidecar shows: requests of the proxy, backends, workers, devices, and the store's contexts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ctxreuse
from ctxreuse.daemon.page.feed import Feed, Panels, Rows
from ctxreuse.daemon.page.panels import StorePanels, shown_text

if TYPE_CHECKING:
    from ctxreuse_cloud.node import CloudNode

__all__ = ["CloudPanels", "cloud_feed"]

_REQUESTS, _PEERS = 64, 256


def cloud_feed(node: CloudNode, not_ready: Callable[[], str], ended: Callable[[], bool]) -> Feed:
    """Return the feed of a sidecar, for one that may not be open yet; ``not_ready``: why requests go elsewhere."""
    panels = CloudPanels(node, not_ready)
    return Feed(panels.all(), idle=panels.of_store.close, ended=ended)


class CloudPanels:
    """The panels of a sidecar; one thread at a time. Those of the store are of all tenants."""

    def __init__(self, node: CloudNode, not_ready: Callable[[], str]) -> None:
        self._node, self._not_ready = node, not_ready
        self.of_store = StorePanels(lambda: node.store)

    def all(self) -> Panels:
        """What makes each panel."""
        return {
            **self.of_store.all(),
            "daemon": self.daemon,
            "tokens": self.tokens,
            "running": self.running,
            "requests": self.requests,
            "peers": self.peers,
            "backends": self.backends,
        }

    def daemon(self) -> dict[str, Any]:
        """What it is, and what it serves."""
        node = self._node
        spaces = node.workers.spaces.values() if node.workers is not None else ()
        names = {model for backend in node.backends.all for model in backend.status().models}
        models = [*(space.architecture for space in spaces), *sorted(names)]
        return {
            "kind": "cloud",
            "version": ctxreuse.__version__,
            "pid": os.getpid(),
            "since": round(node.since, 1),
            "models": [[shown_text(name), "up", ""] for name in models[:16]],
            "texts": False,
            "failing": self._not_ready(),
        }

    def tokens(self) -> dict[str, Any]:
        """Totals since the start, as backends reported them, and requests by how they ended."""
        tokens, outcomes = self._node.counts.totals()
        cached, prompt = tokens.get("cached", 0), tokens.get("prompt", 0)
        return {
            "sources": {"cloud": cached, "compute": max(prompt - cached, 0)},
            "generated": tokens.get("completion", 0),
            "requests": outcomes,
        }

    def running(self) -> dict[str, Any]:
        """Requests at backends, and contexts that wait to be computed."""
        node = self._node
        waiting = node.workers.waiting if node.workers is not None else 0
        active = node.proxy.running if node.proxy is not None else 0
        return {"active": active + waiting, "queued": waiting, "limit": node.settings.cloud.max_waiting}

    def requests(self) -> Rows:
        """The last requests of the proxy: when, model and backend, prompt tokens, and those that were reused."""
        proxy = self._node.proxy
        found = Rows()
        for one in proxy.observers.requests.newest(_REQUESTS) if proxy is not None else ():
            sources = {"cloud": one.cached_tokens} if one.cached_tokens else {}
            who = shown_text(f"{one.model} at {one.backend}")
            found[one.request] = [round(one.at, 2), who, one.prompt_tokens, one.cached_tokens, sources, "", "", "", ""]
        return found

    def peers(self) -> Rows:
        """The connected devices: name, tenant, address, bytes received and sent."""
        bus = self._node.bus
        return Rows(
            (peer.node.hex(), [shown_text(peer.user), shown_text(peer.tenant), peer.address, *_bytes(peer.counts)])
            for peer in (bus.peers() if bus is not None else [])[:_PEERS]
        )

    def backends(self) -> Rows:
        """Backends and engine processes: state, error, what runs, how much in all, and how much of it failed."""
        found = Rows()
        for backend in self._node.backends.all:
            one = backend.status()
            state = {True: "healthy", False: "unhealthy", None: "unknown"}[one.healthy]
            found[one.name] = [state, shown_text(one.error), one.outstanding, one.requests, one.failures]
        for worker in self._node.workers.status() if self._node.workers is not None else ():
            row = [worker.state, shown_text(worker.error), 0, worker.jobs, worker.restarts]
            found[f"worker {worker.number}"] = row
        return found


def _bytes(counts: Any) -> tuple[int, int]:
    return counts.get("bytes_in", 0), counts.get("bytes_out", 0)
