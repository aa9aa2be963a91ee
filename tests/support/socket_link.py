"""For tests of the bus over real sockets: a service from memory that keeps up with its peers, and how to wait."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from ctxreuse.bus.protocol.messages import Terms
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.identity.keys import Tokens
from support.memory_link import blocks_of, space_of, tokens_of
from support.waiting import until

SPACE = space_of(heads=4, dim=32)
TOKENS = tokens_of(24 * 4)
BLOCKS = blocks_of(SPACE, TOKENS)
KEYS = [key for key, _ in BLOCKS]
DATA = [data for _, data in BLOCKS]
SIZES = [len(data) for data in DATA]
#: Waits of milliseconds between attempts to connect.
QUICK = Limits(backoff=(0.005, 0.05))
#: Small payloads, so that small blocks take many.
SMALL = Limits(terms=Terms(max_payload=4096, heartbeat_ms=200), announce_every=0.02, backoff=QUICK.backoff)


def whole(fetch: Any, timeout: float = 20.0) -> bool:
    """True once a fetch is here and is what was sent."""
    last = fetch.count
    fetch.tail(last, timeout)
    until(lambda: fetch.ended is not None, timeout)
    return fetch.ended == "" and [bytes(view.buffer) for view in fetch.views(last)] == DATA[fetch.first :]


@contextlib.contextmanager
def link(node: Any, server: dict[str, Any] | None = None, **client: Any) -> Iterator[tuple[BusServer, BusClient]]:
    """A server and a client that is up."""
    with BusServer(node, **({"limits": SMALL} | (server or {}))) as served:
        options = {"limits": SMALL, "spaces": [SPACE.digest]} | client
        with BusClient(options.pop("endpoint", served.endpoint), ClientOptions(**options)) as connected:
            until(lambda: connected.state == "up")
            yield served, connected


class Baker:
    """Makes the blocks of a node's prefills in a thread, one after another."""

    def __init__(self, node: Any, blocks: Sequence[bytes] = DATA) -> None:
        self.node, self.blocks = node, blocks
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(0.001):
            for supply, tokens, first in list(self.node.jobs):
                for item in range(len(tokens) // 4 - first):
                    if not supply.closed and supply.items[item] is None:
                        supply.make(item, self.blocks[first + item])
                        time.sleep(0.001)

    def close(self) -> None:
        self._ends.set()
        self._thread.join()


@contextlib.contextmanager
def raw(endpoint: str, kind: int = zmq.DEALER, **options: Any) -> Iterator[zmq.Socket[Any]]:
    """A bare socket to an endpoint."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(endpoint)
        yield socket


def open_descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def tokens_until(blocks: int) -> Tokens:
    """The tokens of so many blocks from the start."""
    return TOKENS[: 4 * blocks]
