"""Two devices and a cloud over real sockets: what one computed the other fetches; without the cloud all goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from demo.relay import Relay

from ctxreuse.bus.auth.allowlist import Allowed, AllowList
from ctxreuse.bus.auth.curve import KeyPair, ServerAuth
from ctxreuse.bus.transport import BusServer
from ctxreuse.cost import PrefillLine
from ctxreuse.errors import ConfigError
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.store import TieredStore
from support.waiting import patient, until

QUESTION = {
    "messages": [{"role": "user", "content": "What does the long manual say about the box? " * 30}],
    "temperature": 0,
    "max_tokens": 8,
}


class Cloud:
    """A bus server with a store in memory; ``stop`` it and ``start`` it again at the same address."""

    def __init__(self, folder: Path, auth: ServerAuth | None = None) -> None:
        folder.mkdir()
        self._auth = auth
        self.store = TieredStore(64 << 20)
        tenant = auth.tenant if auth is not None else {"local": "local"}.get
        self.service = StoreService(self.store, folder, ServeOptions(tenant_of=tenant))
        self._bind = "tcp://127.0.0.1:0"
        self._server: BusServer | None = None
        self.start()

    def start(self) -> None:
        self._server = BusServer(self.service, self._bind, auth=self._auth)
        self._server.start()
        self._bind = self.endpoint = self._server.endpoint

    def stop(self) -> None:
        if self._server is not None:
            self._server.close(1)
            self._server = None

    def close(self) -> None:
        self.stop()
        self.service.close()
        self.store.close()


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Callable[..., Cloud]]:
    with ExitStack() as stack:

        def start(**options: Any) -> Cloud:
            made = Cloud(tmp_path / "cloud", **options)
            stack.callback(made.close)
            return made

        yield start


def ask(edge: Any, **more: Any) -> tuple[str, dict[str, int]]:
    answer = edge.http.post("/v1/chat/completions", json=QUESTION | more)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]["sources"]


def state(edge: Any) -> str:
    return str(edge.http.get("/api/status").json()["clouds"][0]["state"])


def whole_blocks(edge: Any) -> int:
    """Those that other nodes are offered."""
    size = edge.node.runtime.space.block_tokens
    return sum(entry.tokens == size for entry in edge.node.store.walk())


def test_a_context_is_computed_by_one_and_fetched_by_another(cloud: Any, serve: Any, tmp_path: Path) -> None:
    held = cloud()
    clouds = {"bus.clouds": [{"endpoint": held.endpoint, "name": "home"}]}
    a = serve(**clouds, **{"store.path": str(tmp_path / "a")})
    until(lambda: state(a) == "up")
    text, sources = ask(a)
    assert sources["compute"] == sum(sources.values())
    given = until(lambda: [e for e in a.http.post("/api/sync").json()["links"] if not e["pending_blocks"]])
    assert given[0]["sent_blocks"] > 0
    assert held.store.stats().blocks == whole_blocks(a)

    b = serve(**clouds, **{"store.path": str(tmp_path / "b")})
    until(lambda: b.node.links.remote.offer(b.node.runtime.engine.space, tokens(b), after=0, timeout=patient(5)))
    # A model of two layers computes as fast as it fetches: let this device believe that it is a slow one.
    b.node.runtime.cost.prefill = slow = PrefillLine()
    for n in (16, 64, 256, 1024):
        slow.observe(n, 0, n * 0.01)
    again, sources = ask(b)
    assert again == text
    assert sources["cloud"] >= 64
    figures = b.http.get("/metrics").text
    assert 'ctxreuse_links{state="up"} 1.0' in figures
    assert b.node.metrics.read("ctxreuse_link_bytes_total", "in") > 0

    # The cloud goes away: what was fetched is here now, and what is new is computed.
    held.stop()
    until(lambda: state(b) == "down")
    again, sources = ask(b)
    assert (again, sources["cloud"]) == (text, 0)
    assert sources["device"] > 0
    b.close()
    b = serve(**clouds, **{"store.path": str(tmp_path / "b")})
    again, sources = ask(b)
    assert again == text
    assert sources["disk"] > 0


def tokens(edge: Any) -> Any:
    from ctxreuse.engines.prompt import encode_prompt
    from ctxreuse.engines.text import Message

    return encode_prompt(edge.node.runtime.text, [Message("user", QUESTION["messages"][0]["content"])]).ids  # type: ignore[index]


def test_what_was_computed_offline_is_given_later(cloud: Any, serve: Any) -> None:
    held = cloud()
    held.stop()
    edge = serve(**{"bus.clouds": [{"endpoint": held.endpoint}]})
    _, sources = ask(edge)
    assert sources["cloud"] == 0
    assert edge.http.post("/api/sync").json()["enabled"] is True
    assert held.store.stats().blocks == 0
    held.start()
    until(lambda: held.store.stats().blocks == whole_blocks(edge) > 0)
    until(lambda: edge.node.metrics.read("ctxreuse_sync_blocks_total") >= held.store.stats().blocks)


def test_a_link_that_went_dead_does_not_hold_up_the_end(cloud: Any, serve: Any) -> None:
    place = cloud().endpoint.rpartition(":")[2]
    with Relay(("127.0.0.1", int(place))) as relay:
        edge = serve(**{"bus.clouds": [{"endpoint": relay.endpoint}], "edge.drain": 1})
        until(lambda: state(edge) == "up")
        relay.stall()
        ask(edge)
        asking = threading.Thread(target=edge.http.post, args=("/api/sync",))
        asking.start()
        until(lambda: edge.node.links._sync.status().running)
        at = time.monotonic()
        edge.close()
        assert time.monotonic() - at < 50  # an offer may take a minute
        asking.join()


def test_keys_decide_who_may_connect(cloud: Any, serve: Any, tmp_path: Path) -> None:
    keys = {name: KeyPair.new() for name in ("cloud", "mine", "stranger")}
    for name, pair in keys.items():
        pair.write(tmp_path / f"{name}.key")
        pair.write_public(tmp_path / f"{name}.pub")
    entry = Allowed("laptop", keys["mine"].public, "me", datetime(2026, 1, 1, tzinfo=UTC))
    AllowList(tmp_path / "allow.toml").allow(entry)
    auth = ServerAuth.open(tmp_path / "cloud.key", tmp_path / "allow.toml")
    held = cloud(auth=auth)
    clouds = [{"endpoint": held.endpoint, "server_key": str(tmp_path / "cloud.pub")}]
    edge = serve(**{"bus.clouds": clouds, "bus.key_file": str(tmp_path / "mine.key")})
    until(lambda: state(edge) == "up")
    other = {"store.path": str(tmp_path / "other"), "bus.key_file": str(tmp_path / "stranger.key")}
    stranger = serve(**{"bus.clouds": clouds, **other})
    until(lambda: state(stranger) == "refused")
    assert ask(stranger)[0] == ask(edge)[0]


def test_links_that_cannot_be_are_refused_at_the_start(serve: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ctxreuse keys add"):
        serve(**{"bus.clouds": [{"endpoint": "tcp://cloud.example:7353"}]})
    with pytest.raises(ConfigError):
        serve(**{"bus.clouds": [{"endpoint": "tcp://127.0.0.1:7353", "server_key": "nonsense"}]})
    # The store was given back each time.
    assert ask(serve())[0]


def test_what_was_learnt_of_costs_outlives_the_daemon(cloud: Any, serve: Any, tmp_path: Path) -> None:
    held = cloud()
    clouds = {"bus.clouds": [{"endpoint": held.endpoint}]}
    edge = serve(**clouds)
    ask(edge)
    known = len(edge.node.runtime.cost.prefill)
    assert known > 0
    assert sum(edge.node.metrics.read("ctxreuse_decisions_total", way) for way in ("recompute", "layers", "tail")) == 1
    edge.close()
    edge = serve(**clouds)
    assert len(edge.node.runtime.cost.prefill) == known
    edge.close()
    (tmp_path / "store" / "cost.bin").write_bytes(b"\xffnonsense")
    assert ask(serve(**clouds))[0]
