"""What backends say of their caches: their KV events, received and kept for the router."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from ctxreuse.bus.transport.subscriber import KvSubscriber
from ctxreuse.config import BackendConfig
from ctxreuse.config.hosts import is_loopback
from ctxreuse.errors import ConfigError
from ctxreuse.routing import MOST_BYTES, EventFeed, PromptTokens, Reported, Source

__all__ = ["BackendEvents", "check_events", "subscribe"]

log = logging.getLogger(__name__)


class BackendEvents:
    """The events of one backend. Any thread may call; batches come in that of its `KvSubscriber`."""

    def __init__(self, name: str, feed: EventFeed | None = None) -> None:
        self._name, self._feed = name, feed if feed is not None else EventFeed()
        self._lock = threading.Lock()
        self._said: Source = "text"

    @property
    def source(self) -> Source:
        """By what it is known what the backend has."""
        with self._lock:
            return self._feed.source

    @property
    def blocks(self) -> int:
        """Blocks that it has, by its events."""
        return len(self._feed.blocks)

    @property
    def lost(self) -> int:
        """Batches that did not come."""
        return self._feed.lost

    def match(self, prompt: PromptTokens) -> Reported | None:
        """See `EventFeed.match`."""
        with self._lock:
            return self._feed.match(prompt)

    def receive(self, number: int, data: bytes) -> int | None:
        """See `EventFeed.receive`."""
        with self._lock:
            missing = self._feed.receive(number, data)
        self._say()
        return missing

    def replay(self, number: int, data: bytes) -> None:
        """See `EventFeed.replay`."""
        with self._lock:
            self._feed.replay(number, data)

    def replayed(self) -> None:
        """See `EventFeed.replayed`."""
        with self._lock:
            self._feed.replayed()
        self._say()

    def disconnected(self) -> None:
        """See `EventFeed.disconnected`."""
        with self._lock:
            self._feed.disconnected()
        self._say()

    def _say(self) -> None:
        source = self._feed.source
        if source != self._said:
            self._said = source
            extra = {"backend": self._name, "source": source, "lost": self._feed.lost}
            log.info("what a backend has is known by %s", _WORDS[source], extra=extra)


_WORDS = {
    "events": "its KV events",
    "both": "its KV events and what it was sent: it does not say all",
    "text": "what it was sent",
}


def check_events(configs: Sequence[BackendConfig]) -> None:
    """Raise ConfigError for backends whose events would go over in one, or listen on other machines' networks."""
    seen = set[str]()
    for config in configs:
        place = config.kv_events
        if place and place in seen:
            raise ConfigError("two backends have the same kv_events", where=place, fix="Give each its own address")
        seen.add(place)
        if config.kv_replay and not place:
            raise ConfigError("kv_replay is set without kv_events", where=config.url)
        host = place.removeprefix("@tcp://").rpartition(":")[0].strip("[]")
        if place.startswith("@") and not is_loopback(host):
            raise ConfigError(
                "KV events carry no key, so they are listened for on this machine only",
                where=place,
                fix="Have the backend listen (tcp://*:5557) and name its address without @",
            )


def subscribe(config: BackendConfig, events: BackendEvents) -> KvSubscriber:
    """Receive a backend's events until it is closed. Raises ConfigError for an address that cannot be used."""
    return KvSubscriber(config.kv_events, config.kv_replay, events, MOST_BYTES)
