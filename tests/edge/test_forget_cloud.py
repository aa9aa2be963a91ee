"""A deletion reaches the cloud that has copies, also one that was away; and no other tenant's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.bus.auth.curve import LOCAL
from ctxreuse.bus.transport import BusServer
from ctxreuse.identity.keys import prefix_keys
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.store import open_store
from support.raw_files import found_in_files
from support.waiting import until

SECRET = "The password of the harbour office is marmalade forty-seven. "
OTHER = "Swallows nest under our roof near a customs house each May. "


class Cloud:
    """A bus server with a store on disk; ``stop`` it and ``start`` it again at the same address."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._bind = folder, "tcp://127.0.0.1:0"
        self.start()

    def start(self) -> None:
        self.store = open_store(self.folder, capacity=64 << 20, host_bytes=1 << 20)
        self.service = StoreService(
            self.store, self.folder, ServeOptions(tenant_of={LOCAL: LOCAL}.get, tenants=[LOCAL])
        )
        self._server = BusServer(self.service, self._bind)
        self._server.start()
        self._bind = self.endpoint = self._server.endpoint

    def stop(self) -> None:
        self._server.close(1)
        self.service.close()
        self.store.close()


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    made = Cloud(tmp_path / "cloud")
    yield made
    made.stop()


@pytest.fixture
def edge(serve: Callable[..., Any], cloud: Cloud) -> Any:
    return serve(**{"bus.clouds": [{"endpoint": cloud.endpoint}]})


def ask(edge: Any, text: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    answer = edge.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def traces(edge: Any, cloud: Cloud, text: str) -> list[str]:
    ids = edge.http.post("/tokenize", json={"prompt": text}).json()["tokens"][2:-2]
    cloud.store.flush()
    return found_in_files(cloud.folder, [text], [ids])


def synced(edge: Any, cloud: Cloud) -> None:
    """Send all, and wait until the cloud has it."""
    edge.node.store.flush()

    def done() -> bool:
        link = edge.http.post("/api/sync").json()["links"][0]
        return link["state"] == "up" and link["sent_blocks"] > 0 and not link["pending_blocks"]

    until(done)


def compacted(cloud: Cloud) -> None:
    disk = cloud.store.disk
    assert disk is not None
    assert cloud.service.deleted.compacted(disk.compact)


def test_a_cloud_deletes_what_its_device_deletes(edge: Any, cloud: Cloud) -> None:
    chat = ask(edge, SECRET * 4)
    ask(edge, OTHER * 4)
    synced(edge, cloud)
    blocks = cloud.store.stats().blocks
    assert traces(edge, cloud, SECRET)
    edge.http.post("/api/forget", json={"request": chat["id"]})
    until(lambda: not edge.node.links.deletions.waiting())
    assert 0 < cloud.store.stats().blocks < blocks
    assert cloud.service.counts["forgotten"] == 1
    compacted(cloud)
    assert traces(edge, cloud, SECRET) == []
    assert traces(edge, cloud, OTHER), "what was not deleted stays"
    assert not cloud.service.deleted.compacted(lambda: None)
    cloud.service.check()


def test_a_cloud_that_is_away_deletes_when_it_is_back(edge: Any, cloud: Cloud, serve: Any) -> None:
    chat = ask(edge, SECRET * 4)
    chat_ids = edge.http.post("/tokenize", json={"prompt": SECRET}).json()["tokens"][2:-2]
    synced(edge, cloud)
    cloud.stop()
    until(lambda: edge.http.get("/api/status").json()["clouds"][0]["state"] != "up")
    done = edge.http.post("/api/forget", json={"request": chat["id"]}).json()
    assert list(done["clouds"].values()) == [1]
    edge.close()
    assert found_in_files(cloud.folder, [], [chat_ids])
    cloud.start()
    again = serve(**{"bus.clouds": [{"endpoint": cloud.endpoint}]})
    until(lambda: not again.node.links.deletions.waiting())
    compacted(cloud)
    assert traces(again, cloud, SECRET) == []


def test_nobody_deletes_blocks_of_another_tenant(edge: Any, cloud: Cloud) -> None:
    ask(edge, OTHER * 4)
    synced(edge, cloud)
    first = next(iter(cloud.store.walk())).key
    before = cloud.store.stats().blocks
    assert cloud.service.forget("somebody else", [first, prefix_keys(b"s" * 32, b"t" * 16, [1, 2], 2)[0]]) == 0
    assert cloud.store.stats().blocks == before
    assert cloud.service.forget(LOCAL, [first]) == 1
    assert cloud.store.stats().blocks < before
