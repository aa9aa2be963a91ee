"""For tests of the protocol: a small model space, a node that serves from a dict, and a link in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ctxreuse.block.format import BlockView, BlockWriter, Plane, block_layout, layout_of, parse
from ctxreuse.bus.protocol.base import BlockReceiver, BlockSource, Grant, MatchResult, PutRequest
from ctxreuse.bus.protocol.client import ClientSession
from ctxreuse.bus.protocol.messages import Terms
from ctxreuse.bus.protocol.server import ServerSession
from ctxreuse.bus.protocol.session import Limits, Session
from ctxreuse.bus.protocol.wire import Frame
from ctxreuse.bus.transfer.receive import part_offsets
from ctxreuse.bus.transfer.send import SendScheduler
from ctxreuse.errors import LinkRefusedError, ProtocolError
from ctxreuse.identity.keys import ROOT, Tokens, prefix_keys
from ctxreuse.identity.model import LayerSpec, ModelSpace

SALT = b"salt-of-the-link"
NODE = b"sixteen byte id."


def space_of(*, layers: int = 3, heads: int = 2, dim: int = 8, block_tokens: int = 4, name: str = "a") -> ModelSpace:
    """A model space whose blocks are a few kilobytes."""
    spec = LayerSpec("full", kv_heads=heads, k_dim=dim, v_dim=dim)
    return ModelSpace(
        weights=name * 64,
        architecture="test",
        tokenizer="t" * 64,
        dtype="float32",
        layers=(spec,) * layers,
        rope="{}",
        vocab_size=1000,
        max_tokens=1 << 20,
        block_tokens=block_tokens,
    )


def blocks_of(space: ModelSpace, tokens: Tokens, *, seed: int = 0, salt: bytes = SALT) -> list[tuple[bytes, bytes]]:
    """Keys and sealed bytes of all whole blocks of ``tokens``, with random planes."""
    rng = np.random.default_rng(seed)
    step = space.block_tokens
    made, parent = [], ROOT
    for i, key in enumerate(prefix_keys(space.digest, salt, tokens, step)):
        ids = tokens[i * step : (i + 1) * step]
        writer = BlockWriter(
            block_layout(space),
            kind="block",
            space=space.digest,
            key=key,
            parent=parent,
            end=(i + 1) * step,
            tokens=ids,
            rope_at=i * step,
        )
        for plane in writer.layout.planes:
            writer.plane(plane.layer, plane.role)[:] = rng.integers(0, 256, plane.nbytes, np.uint8)
        made.append((key, writer.seal().tobytes()))
        parent = key
    return made


def state_of(space: ModelSpace, tokens: Tokens, keys: Sequence[bytes], *, nbytes: int = 5000, seed: int = 1) -> bytes:
    """A state at the end of the last of ``keys``, one plane a layer."""
    step, end = space.block_tokens, len(keys) * space.block_tokens
    writer = BlockWriter(
        layout_of(tuple(Plane(layer, "conv0", "uint8", (nbytes,)) for layer in range(len(space.layers)))),
        kind="state",
        space=space.digest,
        key=keys[-1],
        parent=keys[-2] if len(keys) > 1 else ROOT,
        end=end,
        tokens=tokens[end - step : end],
    )
    rng = np.random.default_rng(seed)
    for plane in writer.layout.planes:
        writer.plane(plane.layer, plane.role)[:] = rng.integers(0, 256, plane.nbytes, np.uint8)
    return writer.seal().tobytes()


def tokens_of(count: int, seed: int = 0) -> Tokens:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, 1000, count).astype("<i4")


class DictSource(BlockSource):
    """Items from memory; None is an item that is has not ended."""

    def __init__(self, items: list[bytes | None]) -> None:
        self.items, self.count = items, len(items)
        self.closed = 0
        self._wake: Callable[[], None] | None = None

    def _item(self, item: int) -> bytes | None:
        if self.closed:
            raise AssertionError("used after close")
        return self.items[item]

    def parts(self, item: int) -> tuple[int, ...] | None:
        data = self._item(item)
        if data == b"":
            raise LookupError(item)
        return None if data is None else part_offsets(parse(data))

    def read(self, item: int, start: int, stop: int) -> memoryview:
        data = self._item(item)
        if not data:
            raise LookupError(item)
        return memoryview(data)[start:stop]

    def watch(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def make(self, item: int, data: bytes) -> None:
        """An item is ready."""
        self.items[item] = data
        if self._wake is not None:
            self._wake()

    def close(self) -> None:
        self.closed += 1


class DictReceiver(BlockReceiver):
    def __init__(self, node: DictNode, keys: Sequence[bytes], state: bool) -> None:
        self.node, self.keys, self.state = node, keys, state
        self.wanted = [i for i, key in enumerate(keys) if key not in (node.states if state else node.blocks)]
        self.closed = 0

    def put(self, item: int, data: memoryview) -> str:
        assert data.readonly
        view: BlockView = parse(data)
        if view.header.key != self.keys[item] or (view.header.kind == "state") != self.state:
            return "foreign"
        try:
            view.verify()
        except Exception:
            return "corrupt"
        if self.state:
            self.node.states[self.keys[item]] = bytes(data)
            return ""
        if len(self.node.blocks) >= self.node.capacity:
            return "full"
        self.node.insert(self.keys[item], bytes(data))
        return ""

    def close(self) -> None:
        self.closed += 1


class DictNode:
    """A `Service` over a dict, for one tenant."""

    encoder = None

    def __init__(self, blocks: Sequence[tuple[bytes, bytes]] = (), *, capacity: int = 1 << 30) -> None:
        self.blocks: dict[bytes, bytes] = dict(blocks)
        self.states: dict[bytes, bytes] = {}
        self.capacity = capacity
        self.version = 1
        self.log: list[tuple[int, bytes, bool]] = []
        self.forgotten = 0
        self.sources: list[DictSource] = []
        self.receivers: list[DictReceiver] = []
        self.jobs: list[tuple[DictSource, Tokens, int]] = []
        self.refuse = ""
        self.taken_back = b""

    def insert(self, key: bytes, data: bytes) -> None:
        self.blocks[key] = data
        self.version += 1
        self.log.append((self.version, key, True))

    def evict(self, key: bytes) -> None:
        del self.blocks[key]
        self.version += 1
        self.log.append((self.version, key, False))

    def admit(self, user: str, node: bytes, spaces: Sequence[bytes]) -> Grant:
        if self.refuse:
            raise LinkRefusedError(self.refuse)
        return Grant(f"tenant-{user}", SALT, ())

    def forget(self, tenant: str, keys: Sequence[bytes]) -> int:
        held = [key for key in keys if key in self.blocks]
        for key in held:
            self.evict(key)
        return len(held)

    def match(self, tenant: str, space: bytes, keys: Sequence[bytes]) -> MatchResult:
        held = next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
        return MatchResult(held, held, sum(len(self.blocks[key]) for key in keys[:held]))

    def open_fetch(self, tenant: str, space: bytes, keys: Sequence[bytes], *, state: bool) -> DictSource:
        items: list[bytes | None] = [self.blocks.get(key, b"") for key in keys]
        if state:
            items.append(self.states.get(keys[-1], b""))
        self.sources.append(DictSource(items))
        return self.sources[-1]

    def open_put(self, tenant: str, request: PutRequest, *, user: str = "") -> DictReceiver:
        self.receivers.append(DictReceiver(self, request.keys, request.state))
        return self.receivers[-1]

    def open_prefill(self, tenant: str, space: bytes, tokens: Tokens, *, first: int, state: bool) -> DictSource:
        if self.refuse:
            raise LinkRefusedError(self.refuse, where="busy")
        source = DictSource([None] * (len(tokens) // 4 - first + state))
        self.sources.append(source)
        self.jobs.append((source, tokens, first))
        return source

    def snapshot(self, tenant: str) -> tuple[int, Sequence[bytes]]:
        return self.version, list(self.blocks)

    def withdrawn(self, tenant: str) -> bytes:
        return self.taken_back

    def changes(self, tenant: str, since: int) -> tuple[int, Sequence[bytes], Sequence[bytes]] | None:
        if since < self.forgotten or since > self.version:
            return None
        last = {key: came for version, key, came in self.log if version > since}
        return self.version, [k for k, came in last.items() if came], [k for k, came in last.items() if not came]


class Wires:
    """Two sessions and the messages on their way between them, in order; one object for one connection at a time."""

    def __init__(self, client: ClientSession, server: ServerSession) -> None:
        self.client, self.server = client, server
        self.now = 0.0
        self.up: deque[list[Frame]] = deque()
        self.down: deque[list[Frame]] = deque()
        self.connected = False
        self.broken: list[ProtocolError] = []

    def connect(self) -> None:
        self.client.opened(self.now)
        self.server.opened(self.now)
        self.connected = True

    def cut(self) -> None:
        """The connection is gone, with all that was on its way."""
        self.up.clear()
        self.down.clear()
        self.client.lost(self.now)
        self.server.lost(self.now)
        self.connected = False

    def send(self, side: Session) -> bool:
        """One message of one side into the channel, as bytes."""
        frames = side.next(self.now)
        if frames is None:
            return False
        (self.up if side is self.client else self.down).append([bytes(frame) for frame in frames])
        return True

    def deliver(self, side: Session) -> bool:
        """The next message to one side; a ProtocolError cuts the connection."""
        queue = self.down if side is self.client else self.up
        if not queue:
            return False
        frames = queue.popleft()
        try:
            side.receive(frames, self.now)
        except ProtocolError as error:
            self.broken.append(error)
            self.cut()
        return True

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.client.tick(self.now)
        self.server.tick(self.now)

    def run(self, steps: int = 100_000) -> None:
        """Until nothing moves."""
        for _ in range(steps):
            moved = self.send(self.client), self.send(self.server), self.deliver(self.client), self.deliver(self.server)
            if not any(moved):
                self.check()
                return
        raise AssertionError("never quiet")

    def check(self) -> None:
        self.client.check()
        self.server.check()


def link(node: DictNode, *, terms: Terms | None = None, limits: Limits | None = None) -> Wires:
    """A client and a server, connected, hello exchanged."""
    limits = limits or Limits(terms=terms or Terms(max_payload=4096))
    client = ClientSession(node=NODE, limits=limits)
    server = ServerSession(node, "edge", SendScheduler(), node=NODE, epoch=7, limits=limits)
    wires = Wires(client, server)
    wires.connect()
    wires.run()
    return wires
