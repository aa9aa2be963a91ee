"""What the daemon's routes work with: empty while it starts, filled when all is open."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from ctxreuse.metrics import Metrics

if TYPE_CHECKING:
    from ctxreuse.config import Settings
    from ctxreuse.runtime import Runtime
    from ctxreuse.store import Ledger, TieredStore
    from ctxreuse_edge.contexts import Contexts
    from ctxreuse_edge.links import Links
    from ctxreuse_edge.worker import Worker

__all__ = ["ModelName", "Node"]


class ModelName(NamedTuple):
    """How the API calls the model, and the folder it came from."""

    id: str
    folder: str


class Node:
    """The parts of a running daemon. No request gets here before `fill` (see `Front`)."""

    def __init__(self) -> None:
        self.metrics = Metrics()

    def fill(
        self,
        settings: Settings,
        runtime: Runtime,
        ledger: Ledger,
        store: TieredStore,
        contexts: Contexts,
        worker: Worker,
        links: Links,
        model: ModelName,
    ) -> None:
        """Everything is open."""
        self.settings, self.runtime, self.ledger, self.store = settings, runtime, ledger, store
        self.contexts, self.worker, self.links, self.model = contexts, worker, links, model
        self.since = time.time()

    @property
    def fingerprint(self) -> str:
        """What answers depend on: the model space, as 16 hex digits."""
        return self.runtime.engine.space.digest.hex()[:16]
