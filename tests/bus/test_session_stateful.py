"""Two sessions over a link that delays, cuts, repeats, swaps, truncates and garbles, with clocks that jump.

Whatever happened: as soon as the link works again, every request ends; a fetch that says it is whole is bit-identical
to what the cloud holds, or its checksums say that it is not (only after messages were garbled); and on a link that only
loses connections nothing that was received is sent again.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.bus.protocol.messages import Terms
from ctxreuse.bus.protocol.server import ServerSession
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transfer.receive import FetchBuffer
from ctxreuse.bus.transfer.send import SendScheduler
from ctxreuse.errors import FormatError
from support.examples import examples
from support.memory_link import NODE, ROOT, DictNode, blocks_of, link, space_of, state_of, tokens_of

SPACE = space_of(heads=2, dim=32)
COUNT = 5
TOKENS = tokens_of(COUNT * 4)
BLOCKS = blocks_of(SPACE, TOKENS)
KEYS = [key for key, _ in BLOCKS]
DATA = dict(BLOCKS)
STATE = state_of(SPACE, TOKENS, KEYS)
LIMITS = Limits(terms=Terms(max_payload=4096, transfers=4, puts=2), stall=30.0)
SPANS = st.tuples(st.integers(0, COUNT - 1), st.integers(1, COUNT)).map(lambda s: (s[0], min(COUNT, s[0] + s[1])))


class CleanLink(RuleBasedStateMachine):
    """Messages are delayed and connections lost; what arrives is what was sent."""

    garbled = False

    @initialize(held=st.integers(0, COUNT), state=st.booleans())
    def start(self, held: int, state: bool) -> None:
        self.node = DictNode(BLOCKS[:held])
        if state:
            self.node.states[KEYS[-1]] = STATE
        self.wires = link(self.node, limits=LIMITS)
        self.fetches: list[FetchBuffer] = []
        self.requests: list[Any] = []

    # ---- what the edge asks for ----

    @rule(span=SPANS, order=st.sampled_from(["layers", "tail"]), state=st.booleans(), window=st.integers(1, 9))
    def fetch(self, span: tuple[int, int], order: Any, state: bool, window: int) -> None:
        first, last = span
        into = FetchBuffer(FetchRequest(SPACE, TOKENS[: 4 * last], first, order=order, state=state), KEYS[:last])
        self.fetches.append(into)
        self.wires.client.fetch(into, window=window, payload=4096)

    @rule(span=SPANS)
    def prefill(self, span: tuple[int, int]) -> None:
        first, last = span
        into = FetchBuffer(FetchRequest(SPACE, TOKENS[: 4 * last], first), KEYS[:last])
        self.fetches.append(into)
        self.wires.client.fetch(into, compute=True)

    @rule()
    def match(self) -> None:
        self.requests.append(self.wires.client.match(SPACE.digest, KEYS))

    @rule(span=SPANS)
    def put(self, span: tuple[int, int]) -> None:
        keys = KEYS[span[0] : span[1]]
        parent = KEYS[span[0] - 1] if span[0] else ROOT
        sizes = [len(DATA[key]) for key in keys]
        self.requests.append(
            self.wires.client.put(PutRequest(SPACE.digest, keys, sizes, parent=parent), lambda i: DATA[keys[i]])
        )

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.fetches)).stop()

    # ---- what happens at the cloud ----

    @rule(data=st.data())
    def make(self, data: st.DataObject) -> None:
        """The next block of a prefill."""
        jobs = [job for job in self.node.jobs if not job[0].closed and None in job[0].items]
        if jobs:
            supply, _, first = data.draw(st.sampled_from(jobs))
            item = supply.items.index(None)
            supply.make(item, DATA[KEYS[first + item]])

    @precondition(lambda self: self.node.blocks)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.node.evict(data.draw(st.sampled_from(sorted(self.node.blocks))))

    @rule()
    def restart(self) -> None:
        """The cloud is killed and comes back with what it holds."""
        wires = self.wires
        wires.cut()
        epoch = wires.server.epoch + 1
        wires.server = ServerSession(self.node, "edge", SendScheduler(), node=NODE, epoch=epoch, limits=LIMITS)

    # ---- the link ----

    @rule(side=st.sampled_from(["client", "server"]), count=st.integers(1, 20))
    def send(self, side: str, count: int) -> None:
        for _ in range(count):
            if not self.wires.send(getattr(self.wires, side)):
                return

    @rule(side=st.sampled_from(["client", "server"]), count=st.integers(1, 20))
    def deliver(self, side: str, count: int) -> None:
        for _ in range(count):
            if not self.wires.deliver(getattr(self.wires, side)):
                return

    @rule(count=st.integers(1, 60))
    def flow(self, count: int) -> None:
        wires = self.wires
        for _ in range(count):
            for side in (wires.client, wires.server):
                wires.send(side)
                wires.deliver(side)

    @rule()
    def cut(self) -> None:
        self.wires.cut()

    @precondition(lambda self: not self.wires.connected)
    @rule()
    def connect(self) -> None:
        self.wires.connect()

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.3, 2.0, 5.0, 1e6, -1e6]))
    def tick(self, seconds: float) -> None:
        self.wires.tick(seconds)
        if self.wires.connected and (self.wires.client.dead or self.wires.server.dead):
            self.wires.cut()

    # ---- what must hold ----

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "wires"):
            return
        self.wires.check()
        for fetch in self.fetches:
            fetch.check()
            if not self.garbled:
                assert fetch.duplicates == 0
                assert fetch.ended != "foreign"
        assert self.garbled or not self.wires.broken
        assert all(DATA[key] == data for key, data in self.node.blocks.items())

    def teardown(self) -> None:
        if not hasattr(self, "wires"):
            return
        wires = self.wires
        for _ in range(3):  # a garbled message may have left something that only a new connection mends
            wires.cut()
            wires.connect()
            for _ in range(COUNT + 1):
                for supply, _, first in self.node.jobs:
                    if not supply.closed:
                        for item in range(len(supply.items)):
                            supply.make(item, DATA[KEYS[first + item]])
                wires.tick(0.3)
                wires.run()
        wires.client.check()
        assert wires.client.drained
        for request in self.requests:
            assert request.done
        for fetch in self.fetches:
            assert fetch.ended is not None
            self.compare(fetch)
        assert len(wires.server.scheduler) == 0
        assert all(source.closed for source in self.node.sources)
        assert all(receiver.closed for receiver in self.node.receivers)
        if not self.garbled:
            assert wires.client.announced(KEYS) == self.node.match("", b"", KEYS).blocks

    def compare(self, fetch: FetchBuffer) -> None:
        views = list(fetch.views(fetch.tail()))
        if fetch.ended == "" and fetch.wants_state:
            held = fetch.state(0)
            assert held is not None
            views.append(held)
        for view in views:
            want = STATE if view.header.kind == "state" else DATA[view.header.key]
            if bytes(view.buffer) != want:
                assert self.garbled
                try:
                    view.verify()
                except FormatError:
                    continue
                # Padding has no checksum, and carries nothing.
                for plane in view.layout.planes:
                    at = view.offset(plane.layer, plane.role)
                    assert bytes(view.plane(plane.layer, plane.role)) == want[at : at + plane.nbytes]


class SpoiledLink(CleanLink):
    """Messages are also repeated, swapped, dropped, truncated, garbled, invented and of other versions."""

    garbled = True

    def queue(self, data: st.DataObject) -> Any:
        up, down = self.wires.up, self.wires.down
        return data.draw(st.sampled_from([queue for queue in (up, down) if queue]))

    @precondition(lambda self: self.wires.up or self.wires.down)
    @rule(data=st.data(), how=st.sampled_from(["repeat", "swap", "drop", "truncate", "flip", "version", "frames"]))
    def spoil(self, data: st.DataObject, how: str) -> None:
        queue = self.queue(data)
        i = data.draw(st.integers(0, len(queue) - 1))
        frames = [bytearray(frame) for frame in queue[i]]
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        match how:
            case "repeat":
                queue.insert(i, queue[i])
            case "swap":
                queue[0], queue[i] = queue[i], queue[0]
            case "drop":
                del queue[i]
            case "frames":
                queue[i] = [*queue[i], b"more"] if len(frames) == 1 else queue[i][:1]
            case _ if frame:
                at = data.draw(st.integers(0, len(frame) - 1))
                if how == "truncate":
                    del frame[at:]
                elif how == "version":
                    frames[0][4:5] = bytes([data.draw(st.integers(0, 255))])
                else:
                    frame[at] ^= 1 << data.draw(st.integers(0, 7))
                queue[i] = frames

    @rule(data=st.data(), frames=st.lists(st.binary(max_size=60), min_size=1, max_size=2), dressed=st.booleans())
    def invent(self, data: st.DataObject, frames: list[bytes], dressed: bool) -> None:
        if dressed:
            number = data.draw(st.integers(1, 20))
            frames[0] = b"ctxb\1\0" + bytes([number, len(frames) - 1]) + frames[0]
        data.draw(st.sampled_from([self.wires.up, self.wires.down])).append(frames)


TestCleanLink = CleanLink.TestCase
TestCleanLink.settings = examples("light", stateful_step_count=50)
TestSpoiledLink = SpoiledLink.TestCase
TestSpoiledLink.settings = examples("light", stateful_step_count=50)
