"""Receiving an engine's KV events over real sockets: what is missed is asked for, what is cut is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from ctxreuse.bus.transport.subscriber import KvSubscriber
from ctxreuse.errors import ConfigError
from support.waiting import patient, until

END = (-1).to_bytes(8, "big", signed=True)


class Seen:
    """Notes what it is given, and wants what is missing."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.replays = self.cuts = 0

    def receive(self, number: int, data: bytes) -> int | None:
        following = self.numbers[-1] + 1 if self.numbers else 0
        if number > following:
            return following
        self.numbers.append(number)
        return None

    def replay(self, number: int, data: bytes) -> None:
        self.numbers.append(number)

    def replayed(self) -> None:
        self.replays += 1

    def disconnected(self) -> None:
        self.cuts += 1


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def publisher(context: zmq.Context[Any], place: str = "tcp://127.0.0.1:*") -> tuple[Any, str]:
    socket = context.socket(zmq.PUB)
    socket.linger = 0
    socket.bind(place)
    return socket, socket.get_string(zmq.LAST_ENDPOINT)


def publish(socket: Any, number: int, data: bytes = b"data") -> None:
    socket.send_multipart([b"", number.to_bytes(8, "big"), data])


def subscribed(socket: Any, seen: Seen, first: int = 0) -> None:
    """Publish a batch until it arrives: what comes before a subscription is lost."""

    def arrived() -> bool:
        publish(socket, first)
        return bool(seen.numbers)

    until(arrived, poll=0.02)


@pytest.mark.parametrize("topic", [[], [b""]])  # SGLang's answers have none
def test_what_is_missed_is_replayed(context: zmq.Context[Any], topic: list[bytes]) -> None:
    socket, place = publisher(context)
    asked: list[int] = []
    with context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> None:
            if not router.poll(patient(10_000)):
                return
            peer, _, start = router.recv_multipart()
            asked.append(int.from_bytes(start, "big"))
            for number in range(asked[0], 5):
                router.send_multipart([peer, b"", *topic, number.to_bytes(8, "big"), b"data"])
            router.send_multipart([peer, b"", *topic, END, b""])

        thread = threading.Thread(target=answer)
        thread.start()
        seen = Seen()
        subscriber = KvSubscriber(place, f"tcp://127.0.0.1:{port}", seen, 1 << 20)
        subscribed(socket, seen)
        while seen.numbers != [0]:  # copies that were on their way
            seen.numbers = [0]
        publish(socket, 4)
        until(lambda: seen.replays)
        thread.join(patient(10))
        assert asked[0] in (1, seen.numbers[0] + 1)
        assert seen.numbers[-3:] == [2, 3, 4]
        subscriber.close()
        subscriber.close()
    socket.close()


def test_without_a_place_to_ask_what_is_missed_is_lost(context: zmq.Context[Any]) -> None:
    socket, place = publisher(context)
    seen = Seen()
    subscriber = KvSubscriber(place, "", seen, 1 << 20)
    subscribed(socket, seen)
    publish(socket, 1 << 40)
    until(lambda: seen.replays)
    subscriber.close()
    socket.close()


def test_a_publisher_that_connects_and_one_that_starts_again(context: zmq.Context[Any]) -> None:
    seen = Seen()
    subscriber = KvSubscriber("@tcp://127.0.0.1:*", "", seen, 1 << 20)
    for cut in (1, 2):
        socket = context.socket(zmq.PUB)
        socket.linger = 0
        socket.connect(subscriber.endpoint)
        seen.numbers = []
        subscribed(socket, seen)
        socket.close()
        until(lambda cut=cut: seen.cuts == cut)
    subscriber.close()


def test_odd_and_large_messages_end_nothing(context: zmq.Context[Any]) -> None:
    socket, place = publisher(context)
    seen = Seen()
    subscriber = KvSubscriber(place, "", seen, 1 << 12)
    subscribed(socket, seen)
    for odd in ([b"x"], [b"", b"short", b"data"], [b"", b"\0" * 8, b"data", b"more"]):
        socket.send_multipart(odd)
    publish(socket, 5, bytes(1 << 13))  # ends the connection
    until(lambda: seen.cuts)
    seen.numbers = []
    subscribed(socket, seen)
    subscriber.close()
    socket.close()


@pytest.mark.parametrize("place", ["", "udp://x:1", "tcp://127.0.0.1", "@tcp://127.0.0.1:port"])
def test_an_address_that_cannot_be_used(place: str) -> None:
    with pytest.raises(ConfigError, match="KV events cannot be received"):
        KvSubscriber(place, "", Seen(), 1 << 20)
