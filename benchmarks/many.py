"""500 edges that ask, fetch and give at once against one sidecar: requests a second, tail latency, memory, losses.

Two processes and real sockets: the sidecar (`BusServer` over a `StoreService` on disk), and this one: each edge is
a `ClientSession` on a DEALER socket of its own, all driven by one thread. An edge has one request under way and makes
the next as soon as it is done, so the sidecar is always as busy as it can be: latency is that of a full queue, about
edges / throughput for everybody if it is fair.

Of the requests 45 % are matches and 35 % fetches of one to four blocks of well-known contexts, 10 % give a new block of
64 KiB and 10 % fetch one that another edge gave. The store is full from the start and evicts all the time, so that
memory is that of a daemon in its steady state. Every byte that comes is compared with what was made. Lost
is what the sidecar took and then did not have, or had otherwise; duplicated what came, or was taken, twice.

Memory is without pages of the store's file, at a sixth of the time and at its end. Before, the edges make `_WARM`
requests each: ZeroMQ takes a queue's memory (32 KiB each way) over its first 256 messages, and keeps it. This process
takes a core itself, so on a small machine the requests a second are its limit as much as the sidecar's (``busy``: cores
that each used).
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter, deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq

from benchmarks.children import Child, sidecar
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.block.format import BlockWriter, block_layout
from ctxreuse.bus.protocol.base import MatchResult, PutRequest, PutResult
from ctxreuse.bus.protocol.client import ClientSession
from ctxreuse.bus.protocol.messages import Terms
from ctxreuse.bus.protocol.session import Limits, Request
from ctxreuse.bus.protocol.wire import Frame
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transfer.receive import FetchBuffer
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import ROOT, prefix_keys
from ctxreuse.identity.model import LayerSpec, ModelSpace

__all__ = ["SPACE", "Crowd", "MadeUp", "run"]

_EDGES, _SECONDS = 500, 60.0
_BLOCK = 64
_SPEC = LayerSpec("full", kv_heads=1, k_dim=32, v_dim=32)
SPACE = ModelSpace("0" * 64, "bench", "0" * 64, "float32", (_SPEC,) * 4, "{}", 1 << 16, 1 << 30, _BLOCK)
#: Well-known contexts and their blocks, and blocks of those that fill the store; bytes that it holds. The known ones
#: are an eighth of it: the last block of each is used some 25 times while as much comes as the store holds.
_KNOWN, _LONG, _FILLER, _CAPACITY = 64, 4, 32, 128 << 20
#: Shares of the requests: match, fetch, give; the rest fetches what another gave.
_MATCH, _FETCH, _GIVE = 0.45, 0.35, 0.10
_MEMORY_BAR = 0.05
#: Requests an edge before the measurement, and seconds that they may take.
_WARM, _WARM_SECONDS = 200, 90.0
#: Seconds that one request may take before the bench gives up.
_WAIT = 30.0
_SWEEP = 0.2


class MadeUp:
    """Blocks of one context under the keys of the link, as sealed bytes."""

    def __init__(self, rng: np.random.Generator, salt: bytes, blocks: int) -> None:
        self.tokens = rng.integers(0, SPACE.vocab_size, blocks * _BLOCK).astype("<i4")
        self.keys = prefix_keys(SPACE.digest, salt, self.tokens, _BLOCK)
        self.blocks: list[memoryview] = []
        for i, (parent, key) in enumerate(pairwise([ROOT, *self.keys])):
            ids = self.tokens[i * _BLOCK : (i + 1) * _BLOCK]
            writer = BlockWriter(
                block_layout(SPACE),
                kind="block",
                space=SPACE.digest,
                key=key,
                parent=parent,
                end=(i + 1) * _BLOCK,
                tokens=ids,
            )
            for plane in writer.layout.planes:
                writer.plane(plane.layer, plane.role)[:] = np.frombuffer(rng.bytes(plane.nbytes), np.uint8)
            self.blocks.append(writer.seal().data.toreadonly())


class _Edge:
    """One session on its socket, and the one request that it has under way."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, number: int) -> None:
        limits = Limits(terms=Terms(heartbeat_ms=2_000, silence_ms=10_000))
        self.session = ClientSession(node=number.to_bytes(16, "big"), spaces=[SPACE.digest], limits=limits)
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.kind, self.since = "", 0.0
        self.about: MadeUp | None = None
        self.request: Request[MatchResult] | Request[PutResult] | FetchBuffer | None = None
        self._held: list[Frame] | None = None

    def send(self, now: float) -> None:
        """Send what the socket takes."""
        while (frames := self._held or self.session.next(now)) is not None:
            self._held = None
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                self._held = frames
                return

    def receive(self) -> None:
        """Take all that is there."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.session.receive([frame.buffer for frame in frames], time.monotonic())

    @property
    def done(self) -> bool:
        """True if the request has ended, well or not."""
        if isinstance(self.request, FetchBuffer):
            return self.request.ended is not None
        return self.request is not None and self.request.done


class Crowd:
    """``edges`` edges of one sidecar, in one thread. Close it."""

    def __init__(self, cloud: Child, edges: int, seed: int = 7) -> None:
        self.cloud, self._random, self._rng = cloud, random.Random(seed), np.random.default_rng(seed)
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, edges + 16)
        self._poller = zmq.Poller()
        self.edges = [_Edge(self._context, cloud.said, number) for number in range(edges)]
        self._by_socket = {edge.socket: edge for edge in self.edges}
        for edge in self.edges:
            self._poller.register(edge.socket, zmq.POLLIN)
            edge.session.opened(time.monotonic())
        self._known: list[MadeUp] = []
        self._given: deque[MadeUp] = deque()
        self._swept = 0.0
        self.millis: list[float] = []
        self._kinds: list[str] = []
        self.counts: Counter[str] = Counter()
        self.memory: list[tuple[float, int]] = []

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)

    def fill(self) -> None:
        """Wait until every edge is up, fill the sidecar's store, and give it the well-known contexts."""
        self._turn_until(lambda: all(edge.session.up for edge in self.edges))
        welcome = self.edges[0].session.welcome
        assert welcome is not None
        self._salt = welcome.salt
        nbytes = 0
        while nbytes < _CAPACITY:
            nbytes += sum(map(len, self._given_at_once(_FILLER).blocks))
        self._known = [self._given_at_once(_LONG) for _ in range(_KNOWN)]

    def _given_at_once(self, blocks: int) -> MadeUp:
        context, edge = MadeUp(self._rng, self._salt, blocks), self.edges[0]
        self._give(edge, context)
        edge.send(time.monotonic())
        self._turn_until(lambda: edge.done)
        assert isinstance(edge.request, Request)
        assert isinstance(edge.request.result, PutResult), edge.request.error
        assert edge.request.result.taken == tuple(range(blocks)), edge.request.result
        return context

    def _turn_until(self, true: Any) -> None:
        deadline = time.monotonic() + _WAIT
        while not true():
            if time.monotonic() > deadline:
                raise EngineError("the sidecar of the bench does not answer")
            self._turn()

    def warm(self, requests: int) -> None:
        """Set every edge to work, and return after so many requests of all of them."""
        for edge in self.edges:
            self._next(edge)
        until = time.monotonic() + _WARM_SECONDS
        while len(self.millis) < requests and time.monotonic() < until:
            self._work()
        self.millis.clear()
        self._kinds.clear()
        self.counts.clear()

    def run(self, seconds: float) -> float:
        """Keep every edge busy for so long, then let all requests end; returns the seconds that it took."""
        began = time.monotonic()
        for part in (seconds / 6, seconds):
            while (now := time.monotonic()) < began + part:
                self._work()
            self.memory.append((now - began, self.cloud.memory))
        took = time.monotonic() - began
        busy = [edge for edge in self.edges if edge.request is not None]
        deadline = time.monotonic() + _WAIT
        while busy and time.monotonic() < deadline:
            for edge in self._turn():
                self._settle(edge)
                busy.remove(edge)
        self.counts["unanswered"] += len(busy)
        return took

    def tails(self) -> dict[str, float]:
        """The 99th percentile of each kind of request in milliseconds."""
        kinds, millis = np.array(self._kinds), np.array(self.millis)
        return {kind: float(np.percentile(millis[kinds == kind], 99)) for kind in dict.fromkeys(self._kinds)}

    def _work(self) -> None:
        for edge in self._turn():
            self._settle(edge)
            self._next(edge)

    def _turn(self) -> list[_Edge]:
        """Move messages once; the edges whose request has ended."""
        now = time.monotonic()
        ended = []
        for socket, _ in self._poller.poll(50):
            edge = self._by_socket[socket]
            edge.receive()
            edge.send(now)
            if edge.done:
                ended.append(edge)
        if now - self._swept > _SWEEP:
            self._swept = now
            for edge in self.edges:
                if edge.session.due(now) <= 0:
                    edge.session.tick(now)
                if edge.session.dead:
                    raise EngineError(f"an edge of the bench lost its link: {edge.session.reason}")
                edge.send(now)
        return ended

    def _next(self, edge: _Edge) -> None:
        """Let an edge ask for something."""
        kind, session = self._random.random(), edge.session
        edge.since = time.monotonic()
        if kind < _MATCH:
            edge.kind, edge.about = "match", self._random.choice(self._known)
            edge.request = session.match(SPACE.digest, edge.about.keys)
        elif kind < _MATCH + _FETCH:
            self._fetch(edge, "fetch", self._random.choice(self._known), self._random.randint(1, _LONG))
        elif kind < _MATCH + _FETCH + _GIVE or not self._given:
            self._give(edge, MadeUp(self._rng, self._salt, 1))
        else:
            self._fetch(edge, "fetch given", self._given.popleft(), 1)
        edge.send(edge.since)

    def _fetch(self, edge: _Edge, kind: str, context: MadeUp, blocks: int) -> None:
        buffer = FetchBuffer(FetchRequest(SPACE, context.tokens[: blocks * _BLOCK]), context.keys[:blocks])
        edge.kind, edge.about, edge.request = kind, context, buffer
        edge.session.fetch(buffer)

    def _give(self, edge: _Edge, context: MadeUp) -> None:
        sizes, read = [len(block) for block in context.blocks], context.blocks.__getitem__
        edge.kind, edge.about = "give", context
        edge.request = edge.session.put(PutRequest(SPACE.digest, context.keys, sizes), read)

    def _settle(self, edge: _Edge) -> None:
        """Look at what an edge got."""
        self.millis.append((time.monotonic() - edge.since) * 1e3)
        self._kinds.append(edge.kind)
        self.counts[edge.kind] += 1
        request, context = edge.request, edge.about
        edge.request = None
        assert context is not None
        if isinstance(request, FetchBuffer):
            if request.ended != "":
                self.counts["lost"] += request.count
                self.counts[f"{edge.kind}: {request.ended}"] += 1
                return
            for view, made in zip(request.views(request.count), context.blocks):
                self.counts["lost"] += view.buffer != made
            self.counts["bytes"] += request.received
            self.counts["duplicated"] += request.duplicates > 0
        elif request is not None and isinstance(request.result, PutResult):
            if request.result.taken == (0,):
                self._given.append(context)
            self.counts["duplicated"] += len(request.result.present)
            self.counts["refused"] += len(request.result.refused)
        elif request is not None and isinstance(request.result, MatchResult):
            self.counts["lost"] += len(context.keys) - request.result.blocks
        else:
            self.counts["failed"] += 1


def run(options: Options) -> list[Figure]:
    """One run; ``quick``: 100 edges for 5 seconds."""
    edges, seconds = options.pick(100, _EDGES), options.pick(5.0, _SECONDS)
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as folder:
        options.step(f"{edges} edges connect")
        with sidecar(Path(folder), capacity=_CAPACITY) as cloud:
            crowd = Crowd(cloud, edges)
            try:
                crowd.fill()
                options.step("warming up")
                crowd.warm(options.pick(0, edges * _WARM))
                options.step(f"{edges} edges for {seconds:.0f} s")
                own, theirs = psutil.Process(os.getpid()), cloud.seconds
                mine = sum(own.cpu_times()[:2])
                took = crowd.run(seconds)
                busy = (cloud.seconds - theirs) / took, (sum(own.cpu_times()[:2]) - mine) / took
            finally:
                crowd.close()
    return figures(crowd, took, busy, bars=not options.quick)


def figures(crowd: Crowd, seconds: float, busy: tuple[float, float], *, bars: bool) -> list[Figure]:
    """What a run was like; ``bars``: with one for memory, which a short run cannot show."""
    counts, millis = crowd.counts, np.array(crowd.millis)
    (at, early), (_, late) = crowd.memory[0], crowd.memory[-1]
    mix = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("match", "fetch", "give", "fetch given"))
    losses = {kind: counts[kind] for kind in ("failed", "refused", "unanswered") if counts[kind]}
    note = f"{mix}; busy: sidecar {busy[0]:.2f}, edges {busy[1]:.2f}"
    return [
        Figure(metric="requests", value=len(millis) / seconds, unit="1/s", note=note),
        Figure(metric="bytes_fetched", value=counts["bytes"] / seconds / 1e6, unit="MB/s"),
        Figure(metric="p50", value=float(np.percentile(millis, 50)), unit="ms", better="lower"),
        Figure(
            metric="p99",
            value=float(np.percentile(millis, 99)),
            unit="ms",
            bound=len(crowd.edges) * seconds * 1e3 / len(millis),
            better="lower",
            note="bound: edges / throughput, if all were served in turn; "
            + ", ".join(f"{kind} {tail:.0f}" for kind, tail in sorted(crowd.tails().items())),
        ),
        Figure(metric=f"memory_{at:.0f}s", value=early / 1e6, unit="MB", better="lower", note="of the sidecar"),
        Figure(
            metric="memory_growth",
            value=late / early - 1,
            unit="share",
            better="lower",
            bar=_MEMORY_BAR if bars else None,
            note=f"from {at:.0f} s to the end",
        ),
        Figure(
            metric="lost",
            value=counts["lost"] + sum(losses.values()),
            unit="blocks",
            better="lower",
            bar=0,
            note=", ".join(f"{n} {kind}" for kind, n in losses.items()),
        ),
        Figure(metric="duplicated", value=counts["duplicated"], unit="blocks", better="lower", bar=0),
    ]
