"""Every way to reach a node keeps the contract: in memory, over plain sockets, over CURVE."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.bus.auth.allowlist import Allowed, AllowList
from ctxreuse.bus.auth.curve import KeyPair, ServerAuth
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.peer.serve.service import StoreService
from ctxreuse.testing.peer import PeerContract, TenantContract, until
from support.memory_node import MemoryLink, MemoryNode
from support.tiny_models import engine_of
from support.waiting import patient

pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def engine() -> Any:
    return engine_of("llama")


class TestWindows(PeerContract):
    """A model that can be resumed only with its states."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Any:
        return engine_of("gemma3")

    def serve(self, service: StoreService) -> MemoryNode:
        return MemoryNode(service)


class TestMemory(TenantContract):
    def serve(self, service: StoreService) -> MemoryNode:
        return MemoryNode(service)


class SocketNode:
    """A `BusServer` and the clients that it gives out; with a folder for keys over CURVE, else plain."""

    def __init__(self, service: StoreService, keys: Path | None = None) -> None:
        self._links: list[BusClient] = []
        self._keys = {user: KeyPair.new() for user in ("cloud", "ann", "ann-2", "bob")} if keys is not None else {}
        auth = None
        if keys is not None:
            allow = AllowList(keys / "allow.toml")
            for user, tenant in (("ann", "a"), ("ann-2", "a"), ("bob", "b")):
                allow.allow(Allowed(user, self._keys[user].public, tenant, datetime.now(UTC)))
            auth = ServerAuth(self._keys["cloud"], allow)
        self._server = BusServer(service, auth=auth)
        self._server.start()

    def link(self, user: str, spaces: Sequence[bytes]) -> BusClient:
        key = self._keys["cloud"].public if self._keys else None
        self._links.append(
            BusClient(
                self._server.endpoint,
                ClientOptions(keys=self._keys.get(user), server_key=key, name=user, spaces=spaces),
            )
        )
        return self._links[-1]

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._server.close(2.0)


class TestPlainSockets(PeerContract):
    def serve(self, service: StoreService) -> SocketNode:
        return SocketNode(service)


def test_a_fetch_and_a_put_survive_cuts(tmp_path: Path, engine: Any) -> None:
    contract = TestMemory()
    with contract.cloud(tmp_path, engine) as cloud:
        link = cloud.up("ann")
        assert isinstance(link, MemoryLink)
        prompt = cloud.prompt(link, 12)
        link.pace = 0.002
        given = threading.Thread(target=prompt.give, args=(link,))
        given.start()
        for _ in range(3):
            link.cut()
        given.join(patient(20))
        cloud.audited()
        assert cloud.store.stats().blocks == 12
        until(lambda: link.announced(prompt.keys) == 12, "nothing is announced")
        fetch = link.fetch(FetchRequest(prompt.space, prompt.tokens), prompt.keys, payload=4096, window=2)
        total = sum(prompt.sizes)
        for share in (0.1, 0.3, 0.5, 0.7):
            until(lambda share=share: fetch.received > share * total or fetch.ended is not None, "nothing comes")
            link.cut()
        assert prompt.arrived(fetch)
        assert link.resumes > 0
        assert fetch.received == total


class TestCurve(TenantContract):
    @pytest.fixture(autouse=True)
    def keys(self, tmp_path: Path) -> None:
        self._folder = tmp_path

    def serve(self, service: StoreService) -> SocketNode:
        return SocketNode(service, self._folder)
