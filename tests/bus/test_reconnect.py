"""Links that are cut, stalled, restarted: nothing is lost, nothing is sent twice, nothing leaks."""

from __future__ import annotations

import gc
import random
import runpy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxreuse.bus.session import Limits
from ctxreuse.bus.wire import Terms
from ctxreuse.bus.zmqio import BusClient, BusServer
from ctxreuse.bus.zmqio_dial import wait_before
from ctxreuse.testing.relay import Relay

W = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("wired.py"))))
SPACE, TOKENS, KEYS, DATA, SIZES = W.SPACE, W.TOKENS, W.KEYS, W.DATA, W.SIZES
PAYLOAD = 4096


def place_of(server: BusServer) -> tuple[str, int]:
    host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


class Linked:
    """A server, a relay, and a client behind it."""

    def __init__(
        self, node: Any, limits: Limits = W.SMALL, *, backoff: tuple[float, float] = (0.001, 0.02), **relay: Any
    ) -> None:
        self.node, self.limits = node, limits
        self.server = BusServer(node, limits=limits)
        self.server.start()
        self.relay = Relay(place_of(self.server), **relay)
        self.client = BusClient(self.relay.endpoint, limits=limits, backoff=backoff)
        W.until(lambda: self.client.state == "up")

    def restart(self, node: Any) -> None:
        """Another life of the server at the same place."""
        endpoint = self.server.endpoint
        self.server.close(0)
        self.server = BusServer(node, endpoint, limits=self.limits)
        self.server.start()

    def __enter__(self) -> Linked:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.client, self.relay, self.server):
            each.close()


@pytest.mark.parametrize("order", ["layers", "tail"])
def test_two_hundred_cuts_at_random_points(order: str) -> None:
    rng = random.Random(order)
    total = sum(SIZES)
    cuts = fetches = 0
    with Linked(W.LINK.DictNode(W.BLOCKS)) as path:
        while cuts < 100:
            before = path.client.stats()
            made = path.relay.moved().connections
            path.relay.cut_after(rng.randrange(1, total))
            fetch = path.client.fetch(SPACE, KEYS, TOKENS, order=order, payload=PAYLOAD)
            while fetch.ended is None:
                # Another one as soon as the link is back, at any moment: in a greeting, a head, a plane, a credit.
                now = path.relay.moved().connections
                if now > made:
                    made, cuts = now, cuts + 1
                    path.relay.cut_after(rng.randrange(1, total))
                fetch.tail(len(KEYS), 0.002)
            fetches += 1
            assert W.whole(fetch), fetch.ended
            fetch.check()
            after = path.client.stats()
            resumes = after.resumes - before.resumes
            # What came twice: at most one payload for each time that it was resumed.
            assert fetch.duplicates <= resumes * PAYLOAD
            received = after.bytes_in - before.bytes_in
            assert received - total <= resumes * PAYLOAD
    assert fetches > 10


def test_puts_survive_cuts() -> None:
    rng = random.Random(5)
    cloud = W.LINK.DictNode()
    with Linked(cloud) as path:
        for _ in range(15):
            cloud.blocks.clear()
            path.relay.cut_after(rng.randrange(1, sum(SIZES)), "up")
            stored = path.client.put(SPACE.digest, KEYS, SIZES, lambda i: DATA[i], timeout=20)
            assert cloud.blocks == dict(W.BLOCKS)
            assert sorted([*stored.taken, *stored.present]) == list(range(len(KEYS)))
        assert path.client.stats().up > 10
        assert all(intake.closed for intake in cloud.intakes)


def test_prefills_survive_cuts() -> None:
    rng = random.Random(6)
    cloud = W.LINK.DictNode()
    baker = W.Baker(cloud)
    try:
        with Linked(cloud) as path:
            for _ in range(5):
                path.relay.cut_after(rng.randrange(1, sum(SIZES)))
                assert W.whole(path.client.prefill(SPACE, KEYS, TOKENS))
            # Everything that a lost connection had asked for was given up.
            W.until(lambda: all(supply.closed for supply in cloud.supplies))
    finally:
        baker.close()


def test_a_thousand_reconnects_leak_nothing() -> None:
    with Linked(W.LINK.DictNode(W.BLOCKS), backoff=(0.0005, 0.002)) as path:

        def again(times: int) -> None:
            for _ in range(times):
                ups = path.client.stats().up
                path.relay.cut()
                W.until(lambda ups=ups: path.client.stats().up > ups)

        again(20)
        gc.collect()
        W.until(lambda: len(path.server.peers()) == 1)
        threads, descriptors = threading.active_count(), W.descriptors()
        again(1000)
        W.until(lambda: len(path.server.peers()) == 1)
        gc.collect()
        W.until(lambda: W.descriptors() <= descriptors)
        assert threading.active_count() <= threads
        assert path.server._accepted == {}
        assert W.whole(path.client.fetch(SPACE, KEYS, TOKENS))


def test_a_server_that_is_restarted_goes_on_with_the_fetch() -> None:
    with Linked(W.LINK.DictNode(W.BLOCKS), rate=200e3) as path:
        fetch = path.client.fetch(SPACE, KEYS, TOKENS, payload=PAYLOAD)
        W.until(lambda: fetch.received > 20_000)
        epoch = path.client.welcome.epoch
        path.restart(W.LINK.DictNode(W.BLOCKS))
        path.relay.set_rate(None)
        assert W.whole(fetch), fetch.ended
        assert path.client.welcome.epoch > epoch
        assert path.client.stats().resumes == 1


def test_a_server_that_comes_back_empty_ends_the_fetch() -> None:
    with Linked(W.LINK.DictNode(W.BLOCKS), rate=200e3) as path:
        fetch = path.client.fetch(SPACE, KEYS, TOKENS, payload=PAYLOAD)
        W.until(lambda: fetch.received > 20_000)
        path.restart(W.LINK.DictNode())
        path.relay.set_rate(None)
        W.until(lambda: fetch.ended is not None)
        assert fetch.ended == "gone"
        assert path.client.match(SPACE.digest, KEYS, 5).blocks == 0


def test_a_dead_link_is_noticed_by_both_sides() -> None:
    limits = Limits(terms=Terms(max_payload=PAYLOAD, heartbeat_ms=100, silence_ms=400))
    with Linked(W.LINK.DictNode(W.BLOCKS), limits) as path:
        path.relay.stall()
        W.until(lambda: path.client.state == "down")
        W.until(lambda: path.server.peers() == [])
        path.relay.cut()
        path.relay.flow()
        W.until(lambda: path.client.state == "up")
        assert W.whole(path.client.fetch(SPACE, KEYS, TOKENS))


def test_a_link_that_falls_to_a_hundredth_still_delivers() -> None:
    with Linked(W.LINK.DictNode(W.BLOCKS), rate=5e6, rtt=0.01) as path:
        fetch = path.client.fetch(SPACE, KEYS, TOKENS, payload=PAYLOAD, window=4)
        W.until(lambda: fetch.received > 20_000)
        path.relay.set_rate(50e3)
        fetch.tail(1, 0.3)
        assert fetch.ended is None
        path.relay.set_rate(5e6)
        assert W.whole(fetch)
        assert path.client.stats().up == 1


def test_waits_between_attempts_grow_and_differ() -> None:
    rng = random.Random(7)
    waits = [[wait_before(attempt, (0.1, 15.0), rng) for _ in range(50)] for attempt in range(2000)]
    for attempt, drawn in enumerate(waits):
        most = min(15.0, 0.1 * 2 ** min(attempt, 60))
        assert most / 2 <= min(drawn) < max(drawn) <= most
