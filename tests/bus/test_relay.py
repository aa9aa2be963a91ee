"""The relay between real sockets: does it keep to its rate and delay, and does it cut where it says?"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from demo.relay import Relay

from support.waiting import patient, until

pytestmark = pytest.mark.timing


class Ends:
    """A client and a server socket with a relay in between."""

    def __init__(self, **options: float) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.relay = Relay(self.server.getsockname(), **options)
        self.near, self.far = self.connect()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        near = socket.create_connection((self.relay.host, self.relay.port))
        far, _ = self.server.accept()
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.settimeout(patient(20))
        return near, far

    def download(self, nbytes: int, before: Callable[[], None] = lambda: None) -> float:
        """Seconds from ``before`` to the last byte: who is late reads what came meanwhile, but never ends too early."""
        start = time.perf_counter()
        before()
        sender = threading.Thread(target=self.far.sendall, args=(bytes(nbytes),))
        sender.start()
        left = nbytes
        while left:
            left -= len(self.near.recv(1 << 20))
        spent = time.perf_counter() - start
        sender.join()
        return spent

    def ping(self) -> float:
        start = time.perf_counter()
        self.near.sendall(b"x")
        assert self.far.recv(1) == b"x"
        self.far.sendall(b"y")
        assert self.near.recv(1) == b"y"
        return time.perf_counter() - start

    def close(self) -> None:
        for each in (self.near, self.far, self.relay, self.server):
            each.close()


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(**getattr(request, "param", {}))
    yield made
    made.close()


@pytest.mark.parametrize("ends", [{"rate": 2.5e6, "rtt": 0.04}, {"rate": 125e6, "rtt": 0.002}], indirect=True)
def test_rate_and_delay(ends: Ends) -> None:
    rate, rtt = ends.relay._necks["down"].rate, 2 * ends.relay._delay
    assert rate is not None
    # A loaded machine can only be late, so the best of some is what the relay does.
    assert rtt <= min(ends.ping() for _ in range(10)) < rtt + patient(0.01)
    assert 0.57 < ends.download(int(rate * 0.6)) < patient(1.2)  # never faster


@pytest.mark.parametrize("ends", [{"rate": 1e6, "rtt": 0.0}], indirect=True)
def test_what_waits_at_the_bottleneck_is_bounded(ends: Ends) -> None:
    ends.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
    ends.near.setblocking(False)
    ends.relay.stall()
    taken, deadline = 0, time.monotonic() + 0.5
    while time.monotonic() < deadline:
        try:
            taken += ends.near.send(bytes(4096))
        except BlockingIOError:
            time.sleep(0.01)
    # The sender's buffer, the relay's kernel buffer, its queue, each at most twice as said.
    assert taken < 512 << 10


@pytest.mark.parametrize("ends", [{"rate": 50e6}], indirect=True)
def test_the_rate_changes_while_it_runs(ends: Ends) -> None:
    assert ends.download(1 << 20) < patient(0.5)
    ends.relay.set_rate(0.5e6)
    assert ends.download(200_000) > 0.3
    ends.relay.set_rate(None)
    assert ends.download(8 << 20) < patient(2)


@pytest.mark.parametrize("ends", [{"rate": 50e6}], indirect=True)
def test_a_trace_is_followed(ends: Ends) -> None:
    # 0.2 s give 200 kB, then nothing for 0.2 s, then the rest.
    trace = [(0.2, 1e6), (0.2, 0.0), (1.0, 1e6)]
    assert 0.45 < ends.download(300_000, lambda: ends.relay.replay(trace, "down")) < patient(1)


def test_cut_drops_and_refuses_until_told(ends: Ends) -> None:
    ends.ping()
    ends.relay.cut(refuse=True)
    with pytest.raises(ConnectionError):
        ends.near.recv(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ends.relay.host, ends.relay.port))
    ends.relay.accept()
    ends.near.close()
    ends.far.close()
    ends.near, ends.far = ends.connect()
    ends.ping()
    assert ends.relay.traffic().connections == 2


@pytest.mark.parametrize("after", [1, 1000, 123_457])
def test_cut_after_hands_on_exactly_so_many_bytes(ends: Ends, after: int) -> None:
    ends.relay.cut_after(after)
    sender = threading.Thread(target=_send_all, args=(ends.far, 1 << 20))
    sender.start()
    got = 0
    try:
        while data := ends.near.recv(65536):
            got += len(data)
    except ConnectionError:
        pass
    sender.join()
    assert got == after
    assert ends.relay.traffic().open == 0


def _send_all(end: socket.socket, nbytes: int) -> None:
    try:
        end.sendall(bytes(nbytes))
    except ConnectionError:
        pass


def test_stall_holds_and_flow_hands_on(ends: Ends) -> None:
    ends.relay.stall()
    ends.near.sendall(b"held")
    ends.far.settimeout(0.1)
    with pytest.raises(TimeoutError):
        ends.far.recv(4)
    ends.relay.flow()
    ends.far.settimeout(patient(5))
    assert ends.far.recv(4) == b"held"


def test_ends_are_passed_on_and_counted(ends: Ends) -> None:
    ends.near.sendall(b"last words")
    ends.near.shutdown(socket.SHUT_WR)
    assert ends.far.makefile("rb").read() == b"last words"
    ends.far.sendall(b"bye")
    ends.far.shutdown(socket.SHUT_WR)
    assert ends.near.makefile("rb").read() == b"bye"
    moved = ends.relay.traffic()
    assert (moved.up, moved.down) == (10, 3)


def test_as_a_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-m", "examples.demo.relay", "127.0.0.1:0", target, "--rate", "8Mbit/s"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as relay:
            assert relay.stdout is not None
            assert relay.stdin is not None
            port = int(relay.stdout.readline())
            with socket.create_connection(("127.0.0.1", port)) as near:
                far, _ = server.accept()
                near.sendall(b"hello")
                assert far.recv(5) == b"hello"
                far.close()

            def counted() -> bool:
                assert relay.stdin is not None
                assert relay.stdout is not None
                relay.stdin.write("traffic\n")
                relay.stdin.flush()
                return '"up":5' in relay.stdout.readline()

            until(counted)  # it counts when it has handed on
            relay.stdin.close()
            assert relay.wait(patient(10)) == 0
