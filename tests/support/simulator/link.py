"""A cloud and up to three edges over links that stall and break, with a store behind the cloud that fails now and then.

The sessions are the product's, without sockets: each message that a side gives or takes is one step, and before any
step a link may be cut with all that is on its way, the cloud killed and started again, time pass, or a call into the
store fail. Links are independent of each other; within one, messages keep their order, as the transport has it.

Whatever happened: nothing that was acknowledged is missing, no byte is wrong, no byte is sent twice over one
connection, and once faults end both sides come to rest, with nothing open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from ctxreuse.bus.protocol.base import MatchResult, PutRequest, PutResult
from ctxreuse.bus.protocol.client import ClientSession
from ctxreuse.bus.protocol.messages import Terms
from ctxreuse.bus.protocol.server import ServerSession
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transfer.receive import FetchBuffer
from ctxreuse.bus.transfer.send import SendScheduler
from ctxreuse.errors import LinkError, LinkRefusedError, StoreFullError
from support.memory_link import (
    NODE,
    ROOT,
    DictNode,
    DictReceiver,
    DictSource,
    Wires,
    blocks_of,
    space_of,
    state_of,
    tokens_of,
)  # fmt: skip

__all__ = ["LinkSchedule", "cut_at_each_step", "run"]

SPACE = space_of(heads=2, dim=32)
COUNT = 5
TOKENS = tokens_of(COUNT * 4)
BLOCKS = blocks_of(SPACE, TOKENS)
KEYS = [key for key, _ in BLOCKS]
DATA = dict(BLOCKS)
STATE = state_of(SPACE, TOKENS, KEYS)
LIMITS = Limits(terms=Terms(max_payload=4096, transfers=4, puts=2), stall=30.0)
_WAITS = (0.0, 0.001, 0.3, 2.0, 5.0, 40.0)


class _FaultySource(DictSource):
    def __init__(self, items: list[bytes | None], node: FaultyNode) -> None:
        super().__init__(items)
        self.node = node

    def read(self, item: int, start: int, stop: int) -> memoryview:
        if self.node.fails():
            raise LookupError(item)
        return super().read(item, start, stop)


class _FaultyReceiver(DictReceiver):
    def put(self, item: int, data: memoryview) -> str:
        return "disk" if self.node.fails() else super().put(item, data)  # type: ignore[attr-defined]


class FaultyNode(DictNode):
    """Each call into its store fails with a chance; what it holds outlives the cloud's process."""

    def __init__(self, blocks: Sequence[tuple[bytes, bytes]], chance: Random, faults: float) -> None:
        super().__init__(blocks)
        self._chance, self.faults = chance, faults

    def fails(self) -> bool:
        return self.faults > 0 and self._chance.random() < self.faults

    def _fail(self) -> None:
        if self.fails():
            raise StoreFullError("the disk has no room left")

    def forget(self, tenant: str, keys: Sequence[bytes]) -> int:
        return 0

    def match(self, tenant: str, space: bytes, keys: Sequence[bytes]) -> MatchResult:
        self._fail()
        return super().match(tenant, space, keys)

    def open_fetch(self, tenant: str, space: bytes, keys: Sequence[bytes], *, state: bool) -> DictSource:
        self._fail()
        plain = super().open_fetch(tenant, space, keys, state=state)
        self.sources[-1] = _FaultySource(plain.items, self)
        return self.sources[-1]

    def open_put(self, tenant: str, request: PutRequest, *, user: str = "") -> DictReceiver:
        self._fail()
        super().open_put(tenant, request, user=user)
        self.receivers[-1] = _FaultyReceiver(self, request.keys, request.state)
        return self.receivers[-1]

    def open_prefill(self, *args: Any, **more: Any) -> DictSource:
        if self.fails():
            raise LinkRefusedError("too many", where="busy")
        return super().open_prefill(*args, **more)


class _Edge:
    """One edge's link, and what it has asked for."""

    def __init__(self, node: FaultyNode, name: str, scheduler: SendScheduler, epoch: int) -> None:
        self.name = name
        client = ClientSession(node=NODE, limits=LIMITS)
        self.wires = Wires(client, self._server(node, scheduler, epoch))
        self.fetches: list[FetchBuffer] = []
        self.matches: list[Any] = []
        self.puts: list[tuple[list[bytes], Any]] = []

    def _server(self, node: FaultyNode, scheduler: SendScheduler, epoch: int) -> ServerSession:
        return ServerSession(node, self.name, scheduler, node=NODE, epoch=epoch, limits=LIMITS)

    def restart(self, node: FaultyNode, scheduler: SendScheduler, epoch: int) -> None:
        self.wires.cut()
        self.wires.server = self._server(node, scheduler, epoch)


class LinkSchedule:
    """One schedule: `play` acts at random, `rest` ends all faults and checks what must hold."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        held = chance.randrange(COUNT + 1)
        self.node = FaultyNode(BLOCKS[:held], chance, chance.choice((0.0, 0.0, 0.02, 0.2)))
        if chance.random() < 0.5:
            self.node.states[KEYS[-1]] = STATE
        self.epoch, self.scheduler = 7, SendScheduler()
        self.edges = [
            _Edge(self.node, f"edge{i}", self.scheduler, self.epoch) for i in range(chance.choice((1, 1, 2, 3)))
        ]
        self.evicted: set[bytes] = set()
        self.acknowledged: set[bytes] = set()
        self.steps = 0
        acts: list[tuple[float, Callable[[_Edge], None]]] = [
            (6, self._step), (3, self._flow), (2, self._fetch), (1, self._prefill), (1, self._match), (2, self._put),
            (0.5, self._stop), (1.5, self._make), (0.3, self._evict), (chance.choice((0.1, 0.6)), self._cut),
            (2, self._connect), (0.8, self._wait), (0.1, self._restart),
        ]  # fmt: skip
        self._weights, self._acts = [weight for weight, _ in acts], [act for _, act in acts]

    def play(self, acts: int) -> None:
        for _ in range(acts):
            edge = self.chance.choice(self.edges)
            self.chance.choices(self._acts, self._weights)[0](edge)
            self.check()

    # ---- acts

    def _span(self) -> tuple[int, int]:
        first = self.chance.randrange(COUNT)
        return first, self.chance.randrange(first + 1, COUNT + 1)

    def _fetch(self, edge: _Edge, compute: bool = False) -> None:
        first, last = self._span()
        order = "layers" if compute else self.chance.choice(("layers", "tail"))
        state = not compute and self.chance.random() < 0.3
        into = FetchBuffer(FetchRequest(SPACE, TOKENS[: 4 * last], first, order=order, state=state), KEYS[:last])
        edge.fetches.append(into)
        edge.wires.client.fetch(into, window=self.chance.randrange(1, 9), payload=4096, compute=compute)

    def _prefill(self, edge: _Edge) -> None:
        self._fetch(edge, compute=True)

    def _match(self, edge: _Edge) -> None:
        edge.matches.append(edge.wires.client.match(SPACE.digest, KEYS))

    def _put(self, edge: _Edge) -> None:
        first, last = self._span()
        keys = KEYS[first:last]
        asked = PutRequest(SPACE.digest, keys, [len(DATA[key]) for key in keys], KEYS[first - 1] if first else ROOT)
        edge.puts.append((keys, edge.wires.client.put(asked, lambda i: DATA[keys[i]])))

    def _stop(self, edge: _Edge) -> None:
        if edge.fetches:
            self.chance.choice(edge.fetches).stop()

    def _make(self, edge: _Edge) -> None:
        for supply, _, first in self.node.jobs:
            if not supply.closed and None in supply.items:
                item = supply.items.index(None)
                supply.make(item, DATA[KEYS[first + item]])
                return

    def _evict(self, edge: _Edge) -> None:
        if self.node.blocks:
            key = self.chance.choice(sorted(self.node.blocks))
            self.node.evict(key)
            self.evicted.add(key)

    def _cut(self, edge: _Edge) -> None:
        edge.wires.cut()

    def _connect(self, edge: _Edge) -> None:
        if not edge.wires.connected:
            edge.wires.connect()

    def _wait(self, edge: _Edge) -> None:
        seconds = self.chance.choice(_WAITS)
        for one in self.edges:
            one.wires.tick(seconds)
            if one.wires.connected and (one.wires.client.dead or one.wires.server.dead):
                one.wires.cut()

    def _restart(self, edge: _Edge) -> None:
        """The cloud is killed, with all its connections, and comes back with what its store holds."""
        self.epoch, self.scheduler = self.epoch + 1, SendScheduler()
        for one in self.edges:
            one.restart(self.node, self.scheduler, self.epoch)

    def _step(self, edge: _Edge) -> None:
        wires = edge.wires
        side = self.chance.choice((wires.client, wires.server))
        call = wires.send if self.chance.random() < 0.5 else wires.deliver
        for _ in range(self.chance.randrange(1, 9)):
            self.steps += 1
            if not call(side):
                return

    def _flow(self, edge: _Edge) -> None:
        wires = edge.wires
        for _ in range(self.chance.randrange(1, 40)):
            self.steps += 4
            for side in (wires.client, wires.server):
                wires.send(side)
                wires.deliver(side)

    # ---- what must hold

    def check(self) -> None:
        """After each act."""
        for edge in self.edges:
            edge.wires.check()
            assert not edge.wires.broken, edge.wires.broken
            for fetch in edge.fetches:
                fetch.check()
                assert fetch.duplicates == 0, "bytes were sent twice"
                assert fetch.ended != "foreign"
            for keys, request in edge.puts:
                if request.done:
                    try:
                        result: PutResult = request.wait(0)
                    except LinkError:
                        continue
                    self.acknowledged |= {keys[i] for i in result.taken}
        assert all(DATA[key] == data for key, data in self.node.blocks.items()), "wrong bytes were stored"
        assert self.acknowledged <= set(self.node.blocks) | self.evicted, "what was acknowledged is not stored"

    def rest(self) -> None:
        """Let all work, then check that all has ended well."""
        self.node.faults = 0.0
        for _ in range(2):
            for edge in self.edges:
                edge.wires.cut()
                edge.wires.connect()
            for _ in range(COUNT + 1):
                for supply, _, first in self.node.jobs:
                    if not supply.closed:
                        for item in range(len(supply.items)):
                            supply.make(item, DATA[KEYS[first + item]])
                for edge in self.edges:
                    edge.wires.tick(0.3)
                self._until_quiet()
        self.check()
        for edge in self.edges:
            assert edge.wires.client.drained
            assert all(request.done for request in edge.matches), "a match never ended"
            assert all(request.done for _, request in edge.puts), "a put never ended"
            for fetch in edge.fetches:
                assert fetch.ended is not None, "a fetch never ended"
                views = list(fetch.views(fetch.tail()))
                if fetch.ended == "" and fetch.wants_state:
                    views.append(fetch.state(0))
                for view in views:
                    want = STATE if view.header.kind == "state" else DATA[view.header.key]
                    assert bytes(view.buffer) == want, "wrong bytes were fetched"
            assert edge.wires.client.announced(KEYS) == self.node.match("", b"", KEYS).blocks
        assert len(self.scheduler) == 0
        assert all(source.closed for source in self.node.sources), "a source was left open"
        assert all(receiver.closed for receiver in self.node.receivers), "a receiver was left open"

    def _until_quiet(self) -> None:
        for _ in range(20_000):
            moved = False
            for edge in self.edges:
                for side in (edge.wires.client, edge.wires.server):
                    moved |= edge.wires.send(side)
                    moved |= edge.wires.deliver(side)
            if not moved:
                return
        raise AssertionError("never quiet")


def run(seed: int) -> str:
    """Run a schedule; raises AssertionError, or whatever a session should never raise. Returns its kind."""
    schedule = LinkSchedule(seed)
    faults = schedule.node.faults
    schedule.play(schedule.chance.choice((10, 30, 80)))
    schedule.rest()
    return f"{len(schedule.edges)} edges, store {'fails' if faults else 'works'}"


def cut_at_each_step(at: int) -> bool:
    """A put, two fetches and a match, with the link cut after step ``at``; False if all had ended before."""
    schedule = LinkSchedule(0)
    schedule.node = FaultyNode(BLOCKS[:3], Random(0), 0.0)
    schedule.edges = [_Edge(schedule.node, "edge", schedule.scheduler, 7)]
    edge, wires = schedule.edges[0], schedule.edges[0].wires
    wires.connect()
    for act in (schedule._put, schedule._fetch, schedule._fetch, schedule._match):
        act(edge)
    step = 0
    while step < at:
        moved = False
        for side in (wires.client, wires.server):
            for call in (wires.send, wires.deliver):
                if step < at and call(side):
                    moved, step = True, step + 1
        if not moved:
            return False
    wires.cut()
    schedule.check()
    schedule.rest()
    return True
