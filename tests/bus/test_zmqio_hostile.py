"""Peers that break the rules over real sockets: the server stays, and nobody else notices."""

from __future__ import annotations

import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import zmq

from ctxreuse.bus.log_limit import LimitedLog
from ctxreuse.bus.protocol import messages, wire
from ctxreuse.bus.protocol.messages import Terms
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.testing.clock import FakeClock
from support.examples import scale
from support.memory_link import DictNode, blocks_of, space_of, tokens_of
from support.socket_link import BLOCKS, DATA, KEYS, QUICK, SPACE, TOKENS, link, raw, whole
from support.waiting import patient, until

pytestmark = pytest.mark.daemon

HELLO = wire.encode(messages.Hello(1, 1, b"sixteen byte id."))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.ERROR)
    yield
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture
def served() -> Iterator[tuple[BusServer, BusClient]]:
    """A server and an honest client, which must be up, on the same connection, at the end too."""
    with link(DictNode(BLOCKS)) as (server, client):
        yield server, client
        assert whole(client.fetch(FetchRequest(SPACE, TOKENS), KEYS))
        assert client.stats().up == 1


def answers(bare: zmq.Socket[Any], count: int, timeout: int = 2000) -> list[Any]:
    found: list[Any] = []
    while len(found) < count and bare.poll(timeout):
        found.append(wire.decode(bare.recv_multipart())[0])
    return found


def test_random_frames(served: tuple[BusServer, BusClient]) -> None:
    rng = random.Random(1)
    for _ in range(scale(60)):
        with raw(served[0].endpoint) as bare:
            if rng.random() < 0.5:
                bare.send_multipart(HELLO)
            for _ in range(rng.randrange(1, 4)):
                frames = [rng.randbytes(rng.choice([0, 1, 8, 100, 5000])) for _ in range(rng.randrange(1, 6))]
                bare.send_multipart(frames)
            bare.poll(rng.choice([0, 0, 20]))
    until(lambda: len(served[0].peers()) == 1)


def test_truncated_and_changed_messages(served: tuple[BusServer, BusClient]) -> None:
    rng = random.Random(2)
    good = [
        HELLO,
        wire.encode(messages.Match(1, SPACE.digest, b"".join(KEYS))),
        wire.encode(messages.Fetch(2, 1, SPACE.digest, b"".join(KEYS), False, "layers", 4096, (), 8)),
        wire.encode(messages.Put(3, 1, SPACE.digest, bytes(32), KEYS[0], (len(DATA[0]),))),
        wire.encode(messages.Payload(3, 1, ((0, 0, 100),)), DATA[0][:100]),
        wire.encode(messages.Ping(4)),
    ]
    for _ in range(scale(60)):
        with raw(served[0].endpoint) as bare:
            bare.send_multipart(HELLO)
            for message in rng.sample(good, 3):
                frames = [bytearray(frame) for frame in message]
                hurt = rng.choice(frames)
                if rng.random() < 0.5:
                    del hurt[rng.randrange(len(hurt)) :]
                else:
                    hurt[rng.randrange(len(hurt))] ^= 1 << rng.randrange(8)
                bare.send_multipart(frames)
            bare.poll(5)
    until(lambda: len(served[0].peers()) == 1)


def test_a_frame_above_the_limit_ends_its_connection(served: tuple[BusServer, BusClient]) -> None:
    with raw(served[0].endpoint, reconnect_ivl=-1) as bare:
        bare.send_multipart(HELLO)
        assert isinstance(answers(bare, 1)[0], messages.Welcome)
        bare.send(bytes(wire.MAX_HEADER + 1))
        until(lambda: len(served[0].peers()) == 1)


def test_garbage_that_is_no_zeromq(served: tuple[BusServer, BusClient]) -> None:
    place = ("127.0.0.1", int(served[0].endpoint.rpartition(":")[2]))
    rng = random.Random(3)
    for _ in range(scale(20)):
        with socket.create_connection(place) as bare:
            bare.sendall(b"GET / HTTP/1.1\r\n\r\n" if rng.random() < 0.3 else rng.randbytes(500))


def test_a_newer_version_is_told_what_is_spoken_here(served: tuple[BusServer, BusClient]) -> None:
    with raw(served[0].endpoint) as bare:
        bare.send_multipart(wire.encode(messages.Hello(2, 9, b"sixteen byte id.")))
        refused = answers(bare, 1)[0]
        assert (refused.id, refused.code) == (0, "version")
        assert "version 1" in refused.text


def test_a_newer_server_is_a_refusal_to_the_client() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with BusClient(f"tcp://127.0.0.1:{port}", ClientOptions(limits=QUICK)) as client:
            name = router.recv_multipart()[0]
            router.send_multipart([name, *wire.encode(messages.Refused(0, "version", "this node speaks version 2"))])
            until(lambda: client.state == "refused")
            assert client.reason == "this node speaks version 2"


def test_a_peer_that_breaks_the_protocol_again_and_again_fills_no_log(
    served: tuple[BusServer, BusClient], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(40):
        with raw(served[0].endpoint, reconnect_ivl=-1) as bare:
            bare.send_multipart([b"nonsense"])
            bare.poll(50)
    until(lambda: len(served[0].peers()) == 1)
    lines = [record for record in caplog.records if "was cut off" in record.getMessage()]
    assert 5 <= len(lines) <= 14


def test_lines_are_limited_by_name_and_what_was_left_out_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    log = LimitedLog(logging.getLogger("flood"), clock.monotonic)
    for n in range(1000):
        log.write("liar", logging.WARNING, "slip %d", n)
    log.write("honest", logging.WARNING, "one")
    assert [record.getMessage() for record in caplog.records][9:] == ["slip 9", "one"]
    clock.advance(30)
    for _ in range(2):
        log.write("liar", logging.WARNING, "again")
    assert caplog.records[-1].getMessage() == "again (990 lines like this were left out)"
    for n in range(5000):
        log.write(f"name {n}", logging.WARNING, "x")
    assert len(log._names) <= 1024


def test_a_routing_id_that_is_taken_twice(served: tuple[BusServer, BusClient]) -> None:
    for _ in range(5):
        with raw(served[0].endpoint, routing_id=b"me") as bare:
            bare.send_multipart(HELLO)
            assert isinstance(answers(bare, 1)[0], messages.Welcome)
            with raw(served[0].endpoint, routing_id=b"me") as second:
                second.send_multipart(HELLO)
                assert answers(second, 1, 50) == []
            bare.send_multipart(wire.encode(messages.Ping(5)))
            assert messages.Pong(5) in answers(bare, 2, 500)


def test_silent_connections_are_cut_off() -> None:
    limits = Limits(terms=Terms(max_payload=4096, heartbeat_ms=100, silence_ms=400))
    with BusServer(DictNode(), limits=limits) as server:
        place = ("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
        with socket.create_connection(place) as mute, raw(server.endpoint, reconnect_ivl=-1) as endless:
            endless.send(b"a message that is never finished", zmq.SNDMORE)
            mute.settimeout(patient(5))
            while mute.recv(100):  # ZeroMQ's greeting, then the end
                pass
            until(lambda: not server._accepted)
            assert server.peers() == []


def test_a_peer_that_grants_and_does_not_read_costs_a_bounded_memory() -> None:
    space = space_of(layers=4, heads=8, dim=128, block_tokens=64)
    tokens = tokens_of(8 * 64)
    blocks = blocks_of(space, tokens)
    keys = b"".join(key for key, _ in blocks)
    limits = Limits(terms=Terms(max_payload=1 << 20, window=256, transfers=32))
    with link(DictNode(blocks), {"limits": limits}, limits=limits) as (server, client):
        place = ("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
        with Stubborn(place) as peer:
            peer.say(wire.encode(messages.Hello(1, 1, b"sixteen byte id.", max_payload=1 << 20)))
            before = psutil.Process().memory_info().rss
            for number in range(1, 33):
                fetch = messages.Fetch(number, 1, space.digest, keys, False, "layers", 1 << 20, (), 256)
                peer.say(wire.encode(fetch))
            # 32 fetches of 21 MB were asked for; what waits is 32 messages of a megabyte.
            worst, deadline = 0, time.monotonic() + 1.0
            while time.monotonic() < deadline:
                worst = max(worst, psutil.Process().memory_info().rss - before)
                fetched = client.fetch(FetchRequest(space, tokens), [key for key, _ in blocks])
                assert fetched.tail(8, patient(20)) == 8, fetched.ended
            assert worst < 96 << 20
            assert len(server.peers()) == 2


class Stubborn:
    """A DEALER by hand that reads nothing after the handshake: ZMTP 3.0 with the NULL mechanism."""

    def __init__(self, place: tuple[str, int]) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(place)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        self._socket.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        while b"READY" not in self._socket.recv(1, socket.MSG_WAITALL) + self._socket.recv(500):
            pass

    def say(self, frames: list[Any]) -> None:
        for i, frame in enumerate(frames):
            self._socket.sendall(struct.pack(">BQ", 2 | (i < len(frames) - 1), len(frame)) + bytes(frame))

    def __enter__(self) -> Stubborn:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_a_bad_service_ends_a_link_and_not_the_server(caplog: pytest.LogCaptureFixture) -> None:
    cloud = DictNode(BLOCKS)
    with link(cloud) as (server, client):
        real, cloud.match = cloud.match, lambda *_: 1 // 0
        assert client.match(SPACE.digest, KEYS, 0.3) is None
        cloud.match = real
        until(lambda: client.state == "up" and client.match(SPACE.digest, KEYS, 1) is not None)
        assert len(server.peers()) == 1
    assert any("serving local failed" in record.message for record in caplog.records)
    caplog.clear()


def test_a_server_that_sends_garbage_is_left_and_tried_again() -> None:
    rng = random.Random(4)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        ends = threading.Event()

        def answer() -> None:
            while not ends.is_set():
                if router.poll(50):
                    name = router.recv_multipart()[0]
                    router.send_multipart([name, rng.randbytes(40)])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with BusClient(f"tcp://127.0.0.1:{port}", ClientOptions(limits=QUICK)) as client:
                until(lambda: client._session.counts["opened"] > 5)
                assert client.state == "down"
        finally:
            ends.set()
            thread.join()
