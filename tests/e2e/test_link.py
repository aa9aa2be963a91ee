"""Two machines' worth of processes share contexts, over real sockets, whatever dies in between."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest

from support.cluster import DOCUMENTS, Cluster, Node, body
from support.waiting import patient, until

pytestmark = pytest.mark.daemon


def up(*edges: Node, times: int = 1) -> None:
    """Their links are up, and have come up so often."""
    for edge in edges:
        until(lambda edge=edge: (link := edge.link())["state"] == "up" and link["up"] >= times)


def given(cloud: Node, blocks: int, *edges: Node) -> None:
    """The cloud holds so many blocks, and these edges know of them."""
    until(lambda: cloud.blocks() >= blocks)
    for edge in edges:
        until(lambda edge=edge: (edge.link()["announced"] or 0) >= blocks)


BLOCKS = 29  # whole blocks of a document


def test_one_edge_computes_another_fetches_a_stranger_gets_nothing(cluster: Cluster) -> None:
    cloud = cluster.cloud()
    a, b, c = (cluster.edge("a").start(), cluster.edge("b").start(), cluster.edge("c", tenant="others").start())
    for edge in (a, b, c):
        edge.ready()
    up(a, b, c)
    text, sources = a.ask(DOCUMENTS[0])
    assert sources["compute"] == sum(sources.values()) > 1900
    given(cloud, BLOCKS, b)  # without being asked for
    fetched, sources = b.ask(DOCUMENTS[0])
    assert fetched == text
    assert sources["cloud"] >= 64
    strange, sources = c.ask(DOCUMENTS[0])
    assert strange == text
    assert sources["compute"] == sum(sources.values())

    cluster.revoke("b")
    until(lambda: b.link()["state"] == "refused")
    assert b.ask(DOCUMENTS[0])[0] == text
    assert b.ask(DOCUMENTS[1])[1]["cloud"] == 0
    assert len(cloud.said("refused a revoked key")) == 1  # however often it has tried by now
    assert {peer["user"] for peer in cloud.status()["peers"]} == {"a", "c"}
    cluster.allow("b")
    up(b)
    for node in (a, b, c, cloud):
        assert node.end() == 0


def test_cloud_killed_and_started_again(cluster: Cluster) -> None:
    cloud = cluster.cloud()
    a, b = cluster.edge("a").start(), cluster.edge("b").start()
    a.ready(), b.ready()
    up(a, b)
    first = a.ask(DOCUMENTS[0])[0]
    given(cloud, BLOCKS)
    cloud.end(signal.SIGKILL)
    second, sources = b.ask(DOCUMENTS[1])
    assert sources["cloud"] == 0
    cloud.start().ready()
    up(a, b, times=2)
    given(cloud, 2 * BLOCKS, a, b)  # what was computed without it too
    assert a.ask(DOCUMENTS[1])[0] == second
    again, sources = b.ask(DOCUMENTS[0])
    assert again == first
    assert sources["cloud"] >= 64
    assert a.status()["tokens"]["cloud"] >= 64


def test_edge_killed_in_mid_fetch_and_in_mid_answer(cluster: Cluster) -> None:
    cloud = cluster.cloud()
    a = cluster.edge("a").start().ready()
    up(a)
    texts = [a.ask(document)[0] for document in DOCUMENTS[:2]]
    given(cloud, 2 * BLOCKS)
    relay = cluster.relay(rate=2e6)
    b = cluster.edge("b", endpoint=relay.endpoint, engine__chunk=64).start().ready()
    up(b)
    given(cloud, 2 * BLOCKS, b)
    before = relay.traffic().down
    asking = threading.Thread(target=_asks, args=(b, DOCUMENTS[0]))
    asking.start()
    until(lambda: relay.traffic().down > before + 100_000)
    b.end(signal.SIGKILL)
    asking.join()

    relay.set_rate(None)
    b.start().ready()
    up(b)
    asked = body(DOCUMENTS[1], tokens=500, stream=True)
    with httpx.stream("POST", b.url + "/v1/chat/completions", json=asked, timeout=patient(60)) as answer:
        lines = answer.iter_lines()
        for _ in range(9):
            next(lines)
        b.end(signal.SIGKILL)
    verified = subprocess.run(
        [sys.executable, "-m", "ctxreuse", "--config", str(b.file), "store", "verify"], capture_output=True, text=True
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
    b.start().ready()
    assert [b.ask(document)[0] for document in DOCUMENTS[:2]] == texts
    assert b.end() == 0


def _asks(edge: Node, document: str) -> None:
    with pytest.raises(httpx.HTTPError):
        edge.ask(document)


def test_an_edge_without_a_network_catches_up(cluster: Cluster) -> None:
    cloud = cluster.cloud()
    cloud.end()
    a = cluster.edge("a").start().ready()
    text = a.ask(DOCUMENTS[0])[0]
    assert a.link()["state"] == "down"
    cloud.start().ready()
    given(cloud, BLOCKS)  # by itself
    b = cluster.edge("b").start().ready()
    given(cloud, BLOCKS, b)
    fetched, sources = b.ask(DOCUMENTS[0])
    assert fetched == text
    assert sources["cloud"] >= 64


def _made_room(store: dict[str, Any], capacity: int) -> bool:
    """Whether a disk holds no more than ``capacity``, as blocks were evicted or new ones declined."""
    disk = store.get("disk") or store["stats"]  # an edge's memory keeps what its disk declined
    return bool(disk["evicted"] or disk["refused"].get("declined")) and disk["nbytes"] <= capacity


@pytest.mark.parametrize("full", ["cloud", "edge"])
def test_a_full_store(cluster: Cluster, full: str) -> None:
    """Room for about one document and a half: older blocks go, answers stay right."""
    capacity = 10 << 20
    cloud = cluster.cloud(**({"store_bytes": capacity} if full == "cloud" else {}))
    small: dict[str, Any] = {"store__capacity": capacity, "edge__live_bytes": 0} if full == "edge" else {}
    a, b = cluster.edge("a", **small).start(), cluster.edge("b", **small).start()
    a.ready(), b.ready()
    up(a, b)
    texts = [a.ask(document)[0] for document in DOCUMENTS]
    until(lambda: httpx.post(a.url + "/api/sync", timeout=patient(60)).json()["links"][0]["sent_blocks"] >= BLOCKS)
    assert [b.ask(document)[0] for document in DOCUMENTS] == texts
    assert [a.ask(document)[0] for document in DOCUMENTS] == texts
    for node in (a, b) if full == "edge" else (cloud,):
        until(lambda node=node: _made_room(node.status()["store"], capacity))
    for node in (a, b, cloud):
        assert node.end() == 0
        assert not [line for line in node.said("") if line["level"] == "error"]


def test_the_proxy_in_front_of_an_edge_streams_and_counts(cluster: Cluster) -> None:
    first = cluster.cloud()
    a = cluster.edge("a").start().ready()
    up(a)
    text = a.ask(DOCUMENTS[0])[0]
    given(first, BLOCKS)
    b = cluster.edge("b").start().ready()
    up(b)
    first.settings["cloud"]["backends"] = [{"url": b.url}]
    first.end()
    first.start().ready()
    up(b, times=2)
    given(first, BLOCKS, b)
    asked = body(DOCUMENTS[0], stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", first.url + "/v1/chat/completions", json=asked, timeout=patient(60)) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert "".join(choice["delta"].get("content") or "" for e in events for choice in e["choices"]) == text
    details = events[-1]["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= details["sources"]["cloud"] >= 64


def test_sigterm_of_the_cloud_in_mid_fetch(cluster: Cluster) -> None:
    cloud = cluster.cloud(drain="1s")
    a = cluster.edge("a").start().ready()
    up(a)
    text = a.ask(DOCUMENTS[0])[0]
    given(cloud, BLOCKS)
    relay = cluster.relay(rate=2e6)
    b = cluster.edge("b", endpoint=relay.endpoint).start().ready()
    given(cloud, BLOCKS, b)
    before = relay.traffic().down
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(b.ask(DOCUMENTS[0])))
    asking.start()
    until(lambda: relay.traffic().down > before + 50_000)
    assert cloud.end() == 0
    asking.join()
    assert found[0][0] == text
    until(lambda: b.link()["state"] == "down")
