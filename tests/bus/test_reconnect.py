"""Links that are cut, stalled, restarted: nothing is lost, nothing is sent twice, nothing leaks."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import msgspec
import pytest
from demo.relay import Relay

from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.bus.protocol.messages import Terms
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.bus.transport.dialer import wait_before
from support.examples import scale
from support.memory_link import DictNode
from support.socket_link import BLOCKS, DATA, KEYS, SIZES, SMALL, SPACE, TOKENS, Baker, open_descriptors, whole
from support.waiting import patient, until

pytestmark = pytest.mark.daemon

PAYLOAD = 4096


def place_of(server: BusServer) -> tuple[str, int]:
    host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


class Linked:
    """A server, a relay, and a client behind it."""

    def __init__(
        self,
        node: Any,
        limits: Limits = SMALL,
        *,
        backoff: tuple[float, float] = (0.001, 0.02),
        **relay: Any,
    ) -> None:
        self.node, self.limits = node, limits
        self.server = BusServer(node, limits=limits)
        self.server.start()
        self.relay = Relay(place_of(self.server), **relay)
        self.client = BusClient(
            self.relay.endpoint, ClientOptions(limits=msgspec.structs.replace(limits, backoff=backoff))
        )
        until(lambda: self.client.state == "up")

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
def test_cuts_at_random_points(order: str) -> None:
    wanted = scale(100)
    rng = random.Random(order)
    total = sum(SIZES)
    cuts = fetches = 0
    with Linked(DictNode(BLOCKS)) as path:
        while cuts < wanted:
            before = path.client.stats()
            made = path.relay.traffic().connections
            path.relay.cut_after(rng.randrange(1, total))
            fetch = path.client.fetch(FetchRequest(SPACE, TOKENS, order=order), KEYS, payload=PAYLOAD)
            while fetch.ended is None:
                # Another one as soon as the link is back, at any moment: in a greeting, a head, a plane, a credit.
                now = path.relay.traffic().connections
                if now > made:
                    made, cuts = now, cuts + 1
                    path.relay.cut_after(rng.randrange(1, total))
                fetch.tail(len(KEYS), 0.002)
            fetches += 1
            assert whole(fetch), fetch.ended
            fetch.check()
            after = path.client.stats()
            resumes = after.resumes - before.resumes
            # What came twice: at most one payload for each time that it was resumed.
            assert fetch.duplicates <= resumes * PAYLOAD
            received = after.bytes_in - before.bytes_in
            assert received - total <= resumes * PAYLOAD
    assert fetches > wanted / 10


def test_puts_survive_cuts() -> None:
    rng, rounds = random.Random(5), scale(15)
    cloud = DictNode()
    with Linked(cloud) as path:
        for _ in range(rounds):
            cloud.blocks.clear()
            path.relay.cut_after(rng.randrange(1, sum(SIZES)), "up")
            stored = path.client.put(PutRequest(SPACE.digest, KEYS, SIZES), lambda i: DATA[i], timeout=patient(20))
            assert cloud.blocks == dict(BLOCKS)
            assert sorted([*stored.taken, *stored.present]) == list(range(len(KEYS)))
        assert path.client.stats().up > rounds / 2
        assert all(receiver.closed for receiver in cloud.receivers)


def test_prefills_survive_cuts() -> None:
    rng = random.Random(6)
    cloud = DictNode()
    baker = Baker(cloud)
    try:
        with Linked(cloud) as path:
            for _ in range(5):
                path.relay.cut_after(rng.randrange(1, sum(SIZES)))
                assert whole(path.client.fetch(FetchRequest(SPACE, TOKENS), KEYS, compute=True))
            # Everything that a lost connection had asked for was given up.
            until(lambda: all(source.closed for source in cloud.sources))
    finally:
        baker.close()


def test_reconnects_leak_nothing() -> None:
    with Linked(DictNode(BLOCKS), backoff=(0.0005, 0.002)) as path:

        def again(times: int) -> None:
            for _ in range(times):
                ups = path.client.stats().up
                path.relay.cut()
                until(lambda ups=ups: path.client.stats().up > ups)

        again(20)
        gc.collect()
        until(lambda: len(path.server.peers()) == 1)
        threads, descriptors = threading.active_count(), open_descriptors()
        again(scale(1000))
        until(lambda: len(path.server.peers()) == 1)
        gc.collect()
        until(lambda: open_descriptors() <= descriptors)
        assert threading.active_count() <= threads
        assert path.server._accepted == {}
        assert whole(path.client.fetch(FetchRequest(SPACE, TOKENS), KEYS))


def test_a_server_that_is_restarted_goes_on_with_the_fetch() -> None:
    with Linked(DictNode(BLOCKS), rate=200e3) as path:
        fetch = path.client.fetch(FetchRequest(SPACE, TOKENS), KEYS, payload=PAYLOAD)
        until(lambda: fetch.received > 20_000)
        epoch = path.client.welcome.epoch
        path.restart(DictNode(BLOCKS))
        path.relay.set_rate(None)
        assert whole(fetch), fetch.ended
        assert path.client.welcome.epoch > epoch
        assert path.client.stats().resumes == 1


def test_a_server_that_comes_back_empty_ends_the_fetch() -> None:
    with Linked(DictNode(BLOCKS), rate=200e3) as path:
        fetch = path.client.fetch(FetchRequest(SPACE, TOKENS), KEYS, payload=PAYLOAD)
        until(lambda: fetch.received > 20_000)
        path.restart(DictNode())
        path.relay.set_rate(None)
        until(lambda: fetch.ended is not None)
        assert fetch.ended == "gone"
        assert path.client.match(SPACE.digest, KEYS, 5).blocks == 0


def test_a_dead_link_is_noticed_by_both_sides() -> None:
    limits = Limits(terms=Terms(max_payload=PAYLOAD, heartbeat_ms=100, silence_ms=400))
    with Linked(DictNode(BLOCKS), limits) as path:
        path.relay.stall()
        until(lambda: path.client.state == "down")
        until(lambda: path.server.peers() == [])
        path.relay.cut()
        path.relay.flow()
        until(lambda: path.client.state == "up")
        assert whole(path.client.fetch(FetchRequest(SPACE, TOKENS), KEYS))


def test_a_link_that_falls_to_a_hundredth_still_delivers() -> None:
    with Linked(DictNode(BLOCKS), rate=5e6, rtt=0.01) as path:
        fetch = path.client.fetch(FetchRequest(SPACE, TOKENS), KEYS, payload=PAYLOAD, window=4)
        until(lambda: fetch.received > 20_000)
        path.relay.set_rate(50e3)
        fetch.tail(1, 0.3)
        assert fetch.ended is None
        path.relay.set_rate(5e6)
        assert whole(fetch)
        assert path.client.stats().up == 1


def test_waits_between_attempts_grow_and_differ() -> None:
    rng = random.Random(7)
    waits = [[wait_before(attempt, (0.1, 15.0), rng) for _ in range(50)] for attempt in range(2000)]
    for attempt, drawn in enumerate(waits):
        most = min(15.0, 0.1 * 2 ** min(attempt, 60))
        assert most / 2 <= min(drawn) < max(drawn) <= most
