"""A network link between real sockets: a TCP relay with a rate, a delay, and everything that can go wrong with it.

Bytes of each direction (``up``: from the connecting side to the target, ``down``: back) pass a bottleneck, shared by
all connections, then wait half the round trip. The queue at the bottleneck is bounded, so TCP slows a fast sender down
as on a real link. Accurate to about 3 % from 20 Mbit/s to 1 Gbit/s; it takes a few percent of a core.

As a process, for benches (commands on standard input, one a line: ``rate 500kB/s``, ``stall``, ``flow``, ``cut``,
``traffic``; it ends with its input)::

    python examples/demo/relay.py 127.0.0.1:0 127.0.0.1:7353 --rate 50Mbit/s --rtt 40ms
"""

from __future__ import annotations

import math
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

__all__ = ["Relay", "Traffic", "Way", "main"]

_MIN_QUEUE = 64 << 10
# The kernel's own buffers are part of the queue, so they are kept small; it doubles the size it is given.
_KERNEL = 64 << 10
_RESET = struct.pack("ii", 1, 0)

#: ``up``: from the connecting side to the target; ``down``: back.
Way: TypeAlias = Literal["up", "down"]

# A pass of the loop moves about this many seconds of the rate; the burst is what an idle link may save up.
_STEP = 0.001
_BURST = 2 * _STEP
_MIN_READ, MAX_READ = 2 << 10, 128 << 10


class Bottleneck:
    """The rate of one direction (bytes/s, None: no limit), as tokens; ``steps`` are what is left of a trace.

    ``passed`` counts bytes handed on; at ``stop_at`` of them the link is to be cut.
    """

    def __init__(self, rate: float | None, now: float) -> None:
        self.rate, self.at, self.tokens, self.passed = rate, now, 0.0, 0
        self.stop_at: int | None = None
        self.steps: Iterator[tuple[float, float | None]] | None = None
        self.until = 0.0

    def advance(self, now: float, busy: bool) -> None:
        """Let time pass. An idle link saves up no more than a burst."""
        while self.steps is not None and self.until <= now:
            self._flow(max(self.until, self.at))
            step = next(self.steps, None)
            if step is None:
                self.steps = None
                break
            self.until += step[0]
            self.rate = step[1]
        self._flow(now)
        if not busy and self.rate is not None:
            self.tokens = min(self.tokens, self.rate * _BURST)

    def _flow(self, now: float) -> None:
        if self.rate is not None:
            self.tokens += self.rate * (now - self.at)
        self.at = now

    def passes(self, nbytes: int) -> bool:
        """True if so many bytes may pass now."""
        return self.rate is None or self.tokens >= nbytes

    def wait(self, nbytes: int) -> float:
        """Seconds until ``nbytes`` may pass, or the rate changes."""
        wait = (nbytes - self.tokens) / self.rate if self.rate else 1.0
        return min(wait, max(0.0, self.until - self.at)) if self.steps is not None else wait

    @property
    def read(self) -> int:
        """Bytes to read at once: small enough that a slow link delivers in small steps."""
        return MAX_READ if self.rate is None else int(min(max(self.rate * _STEP, _MIN_READ), MAX_READ))


class Flow:
    """One direction of one connection: read from ``source``, wait for the rate, wait out the delay, write.

    ``waiting`` (``nbytes``) is what has not passed the bottleneck, ``line`` what has, each with when it is due.
    ``ended``: the source sent its last byte; ``shut``: and so was the sink's; ``blocked``: the sink takes no more now.
    """

    def __init__(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        self.way, self.source, self.sink = way, source, sink
        self.waiting: deque[bytes] = deque()
        self.line: deque[tuple[float, memoryview]] = deque()
        self.nbytes = 0
        self.ended, self.shut, self.blocked = False, False, False


class Traffic(msgspec.Struct, frozen=True):
    """Bytes handed on each way, connections made, and those open now."""

    up: int
    down: int
    connections: int
    open: int


class Relay:
    """A relay to ``target`` in a thread of its own; close it, or use it in a ``with``. Any thread may call.

    ``rate``: bytes a second each way, None: no limit (``rate_up``: another one upwards). ``rtt``: seconds, half of
    it each way. Descriptors of the process must stay below 1,024: `select` is what waits in microseconds.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        rate: float | None = None,
        rate_up: float | None = None,
        rtt: float = 0.0,
        listen: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self.target, self._delay = target, rtt / 2
        now = time.monotonic()
        self._necks = {"up": Bottleneck(rate if rate_up is None else rate_up, now), "down": Bottleneck(rate, now)}
        self._flows: list[Flow] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._stalled, self._ends, self._connections = False, False, 0
        self._selector = selectors.SelectSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        self.host, self.port = listen
        self._listen()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where to connect, as ZeroMQ writes it."""
        return f"tcp://{self.host}:{self.port}"

    def set_rate(self, rate: float | None, way: Way | None = None) -> None:
        """Change the rate from now on, of one way or both; ends a trace."""
        self._call(lambda: self._set([(math.inf, rate)], way))

    def replay(self, trace: Sequence[tuple[float, float]], way: Way | None = None) -> None:
        """Follow a trace of (seconds, bytes/s) from now on; its last rate stays."""
        self._call(lambda: self._set(trace, way))

    def stall(self) -> None:
        """Hand nothing on and read nothing, without closing: a radio that went dead."""
        self._call(lambda: setattr(self, "_stalled", True))

    def flow(self) -> None:
        """End a stall."""
        self._call(lambda: setattr(self, "_stalled", False))

    def cut(self, *, refuse: bool = False) -> None:
        """Reset all connections now; bytes on their way are lost. ``refuse``: also take no new ones until `accept`."""
        self._call(lambda: self._cut(refuse))

    def accept(self) -> None:
        """Take new connections again."""
        self._call(self._listen)

    def cut_after(self, nbytes: int, way: Way = "down") -> None:
        """Cut once, when exactly ``nbytes`` more have been handed on in a direction; new connections are taken."""
        neck = self._necks[way]
        self._call(lambda: setattr(neck, "stop_at", neck.passed + nbytes))

    def traffic(self) -> Traffic:
        """The counts until now."""
        up, down = self._necks["up"].passed, self._necks["down"].passed
        return Traffic(up, down, self._connections, len(self._flows) // 2)

    def close(self) -> None:
        """Reset what is open and end the thread. Idempotent."""
        self._ends = True
        if self._thread.is_alive():
            self._poke()
            self._thread.join()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # All below runs in the relay's thread, `_call` and `_poke` excepted.

    def _call(self, call: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            call()
            done.set()

        self._calls.append(run)
        self._poke()
        while not done.wait(0.05) and self._thread.is_alive():
            pass

    def _poke(self) -> None:
        try:
            self._wake.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # it is awake, or closed

    def _set(self, trace: Sequence[tuple[float, float | None]], way: Way | None) -> None:
        now = time.monotonic()
        for name, neck in self._necks.items():
            if way in (None, name):
                neck.advance(now, True)
                neck.steps, neck.until, neck.tokens = iter(list(trace)), now, 0.0
                neck.advance(now, True)

    def _listen(self) -> None:
        if self._listener is None:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Set before listening, so that the window that peers are offered fits it.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL)
            listener.bind((self.host, self.port))
            listener.listen(512)
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            self._listener = listener
            self._selector.register(listener, selectors.EVENT_READ)

    def _refuse(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _cut(self, refuse: bool) -> None:
        if refuse:
            self._refuse()
        for flow in list(self._flows):
            self._reset(flow.source)

    def _run(self) -> None:
        try:
            while not self._ends:
                while self._calls:
                    self._calls.popleft()()
                wait = self._advance(time.monotonic())
                for key, events in self._selector.select(wait):
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                    elif key.fileobj is self._listener:
                        self._connect()
                    elif events & selectors.EVENT_READ and key.data in self._flows:
                        self._read(key.data)
        finally:
            self._cut(refuse=True)
            self._selector.close()
            self._wake.close()
            self._woken.close()

    def _connect(self) -> None:
        assert self._listener is not None
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        far = socket.socket()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL)
        try:
            far.settimeout(2.0)
            far.connect(self.target)
        except OSError:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            near.close()
            far.close()
            return
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_READ)
        self._connections += 1
        self._flows += [Flow("up", near, far), Flow("down", far, near)]

    def _reset(self, end: socket.socket, *, gently: Sequence[socket.socket] = ()) -> None:
        """Drop the connection that ``end`` belongs to, with a reset except for the ends in ``gently``."""
        ends = {e for flow in self._flows if end in (flow.source, flow.sink) for e in (flow.source, flow.sink)}
        self._flows = [flow for flow in self._flows if flow.source not in ends]
        for each in ends:
            if each.fileno() in self._selector.get_map():
                self._selector.unregister(each)
            if each not in gently:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            each.close()

    def _read(self, flow: Flow) -> None:
        try:
            data = flow.source.recv(self._necks[flow.way].read)
        except BlockingIOError:
            return
        except OSError:
            self._reset(flow.source)
            return
        flow.ended = not data
        if data:
            flow.waiting.append(data)
            flow.nbytes += len(data)

    def _advance(self, now: float) -> float:
        """Move what may move; returns the seconds until more may."""
        wait = 1.0
        for way, neck in self._necks.items():
            flows = [flow for flow in self._flows if flow.way == way]
            waiting = [flow for flow in flows if flow.waiting]
            neck.advance(now, bool(waiting) and not self._stalled)
            if self._stalled:
                neck.tokens = 0.0
                continue
            while waiting:
                # Connections take turns, a read each.
                for flow in list(waiting):
                    if not neck.passes(len(flow.waiting[0])):
                        wait = min(wait, neck.wait(len(flow.waiting[0])))
                        waiting.clear()
                        break
                    data = flow.waiting.popleft()
                    flow.nbytes -= len(data)
                    neck.tokens -= len(data) if neck.rate is not None else 0
                    flow.line.append((now + self._delay, memoryview(data)))
                    if not flow.waiting:
                        waiting.remove(flow)
            # The flow served first goes to the end.
            for flow in flows:
                wait = min(wait, self._deliver(flow, neck, now))
        self._flows = self._flows[2:] + self._flows[:2]
        self._watch()
        return wait

    def _deliver(self, flow: Flow, neck: Bottleneck, now: float) -> float:
        """Write what is due; returns the seconds until something is."""
        flow.blocked = False
        while flow.line and flow.line[0][0] <= now and not flow.blocked and flow in self._flows:
            due, data = flow.line[0]
            room = len(data) if neck.stop_at is None else min(len(data), neck.stop_at - neck.passed)
            try:
                sent = flow.sink.send(data[:room])
            except BlockingIOError:
                flow.blocked = True
                break
            except OSError:
                self._reset(flow.sink)
                break
            neck.passed += sent
            if sent == len(data):
                flow.line.popleft()
            else:
                flow.line[0] = (due, data[sent:])
            if neck.passed == neck.stop_at:
                neck.stop_at = None
                # A reset would throw away what its receiver has not read yet.
                self._reset(flow.sink, gently=[flow.sink])
                self._cut(refuse=False)
        if flow.ended and not flow.shut and not flow.line and not flow.waiting and flow in self._flows:
            flow.shut = True
            back = next(other for other in self._flows if other.source is flow.sink)
            if back.shut:
                self._reset(flow.sink, gently=[flow.sink, flow.source])
            else:
                try:
                    flow.sink.shutdown(socket.SHUT_WR)
                except OSError:  # its peer has reset it
                    self._reset(flow.sink)
        return max(0.0, flow.line[0][0] - now) if flow.line and not flow.blocked else 1.0

    def _watch(self) -> None:
        """Wait for reading where there is room at the bottleneck, for writing where a receiver was slow."""
        for flow in self._flows:
            neck = self._necks[flow.way]
            room = max(_MIN_QUEUE, (neck.rate or 0.0) * 2 * self._delay)
            # Without a rate the line holds what a blocked receiver does not take.
            queued = flow.nbytes + (sum(len(data) for _, data in flow.line) if flow.blocked else 0)
            reads = not (flow.ended or self._stalled or queued >= room)
            back = next((other for other in self._flows if other.sink is flow.source), None)
            events = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * bool(back and back.blocked)
            known = self._selector.get_map().get(flow.source)
            if not events and known:
                self._selector.unregister(flow.source)
            elif events and not known:
                self._selector.register(flow.source, events, flow)
            elif known and known.events != events:
                self._selector.modify(flow.source, events, flow)


def main(arguments: Sequence[str] | None = None) -> None:
    """The relay as a process: prints its port, then obeys its standard input until that ends."""
    import argparse

    from ctxreuse.units import parse_duration, parse_rate

    def place(text: str) -> tuple[str, int]:
        host, _, port = text.rpartition(":")
        return host or "127.0.0.1", int(port)

    parser = argparse.ArgumentParser(prog="python examples/demo/relay.py")
    parser.add_argument("listen", type=place, metavar="LISTEN")
    parser.add_argument("target", type=place, metavar="TARGET")
    parser.add_argument("--rate", type=parse_rate, help="such as 50Mbit/s; no limit if left out")
    parser.add_argument("--rtt", type=parse_duration, default=0.0, help="such as 40ms")
    given = parser.parse_args(arguments)
    with Relay(given.target, rate=given.rate, rtt=given.rtt, listen=given.listen) as relay:
        print(relay.port, flush=True)
        for line in sys.stdin:
            word, _, rest = line.strip().partition(" ")
            if word == "rate":
                relay.set_rate(parse_rate(rest))
            elif word in ("stall", "flow", "cut"):
                {"stall": relay.stall, "flow": relay.flow, "cut": relay.cut}[word]()
            elif word == "traffic":
                print(msgspec.json.encode(relay.traffic()).decode(), flush=True)
            else:
                parser.error(f"no order {word!r}")


if __name__ == "__main__":
    main()
