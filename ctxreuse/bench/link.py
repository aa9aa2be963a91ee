"""The bus over loopback TCP against bare ZeroMQ sockets that carry the same frames, plain and with CURVE.

A fetch of 64 blocks of a 135M model in bfloat16 (30 layers, 3 heads of 64, 64 tokens: 1.5 MB a block) through
BusServer and BusClient, with credit, headers and the protocol's checks, into a sink that counts bytes and drops them;
against a PUSH socket that sends as many frames of the same sizes, one after the other out of the same 98 MB, to a PULL
socket that drops them. Both senders live in one other process, copy or do not copy by the same rule, have at most as
many frames on their way (32), and take turns with each other, round by round. ``into_memory`` fetches in the order of
layers into an `FetchBuffer` (fresh memory, heads checked) against a PULL that copies each frame into fresh memory. The
bare sockets then do less: the bus gathers a layer of all blocks into a payload, 48 KB from each, and scatters it to as
many places, so that both ends touch memory that no cache holds once more than PUSH and PULL do. ``one_block`` is the
time of a fetch of one block, requested by one thread and received by another, against a request and a reply of one such
frame in one thread.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import zmq

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.block.format import BlockWriter, block_layout, parse
from ctxreuse.bus.auth.allowlist import Allowed, AllowList
from ctxreuse.bus.auth.curve import KeyPair, ServerAuth
from ctxreuse.bus.protocol.base import BlockSource, Grant, MatchResult
from ctxreuse.bus.protocol.messages import Piece, Terms
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transfer.receive import FetchBuffer, part_offsets
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.bus.transport.sockets import COPY_BELOW, SEND_QUEUE
from ctxreuse.clock import SYSTEM_CLOCK
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import ROOT, as_tokens, prefix_keys
from ctxreuse.identity.model import LayerSpec, ModelSpace

__all__ = ["run", "serve"]

_TOKENS, _SALT = 64, bytes(16)
_LIMITS = Limits(terms=Terms(max_payload=4 << 20))
_SIZES = {"64KiB": 64 << 10, "1MiB": 1 << 20, "4MiB": 4 << 20}
_WAIT = 60.0


def _space() -> ModelSpace:
    layer = LayerSpec("full", kv_heads=3, k_dim=64, v_dim=64)
    return ModelSpace(
        weights="0" * 64,
        architecture="bench",
        tokenizer="0" * 64,
        dtype="bfloat16",
        layers=(layer,) * 30,
        rope="{}",
        vocab_size=50_000,
        max_tokens=1 << 20,
        block_tokens=_TOKENS,
    )


class _Context:
    """Keys, ids and sealed bytes of a context of ``blocks`` blocks."""

    def __init__(self, blocks: int) -> None:
        self.space = _space()
        self.tokens = as_tokens(np.arange(blocks * _TOKENS) % 50_000)
        self.keys = prefix_keys(self.space.digest, _SALT, self.tokens, _TOKENS)

    def sealed(self) -> Iterator[bytes]:
        """The blocks, all with the same noise: nothing is compressed here."""
        layout, parent = block_layout(self.space), ROOT
        noise = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
        for i, key in enumerate(self.keys):
            ids, end = self.tokens[i * _TOKENS : (i + 1) * _TOKENS], (i + 1) * _TOKENS
            writer = BlockWriter(
                layout, kind="block", space=self.space.digest, key=key, parent=parent, end=end, tokens=ids
            )
            for plane in layout.planes:
                writer.plane(plane.layer, plane.role)[:] = noise[: plane.nbytes]
            yield writer.seal().tobytes()
            parent = key


class _Stored(BlockSource):
    """Blocks in memory."""

    def __init__(self, blocks: Sequence[bytes]) -> None:
        self.count = len(blocks)
        self._blocks = [memoryview(block) for block in blocks]
        self._offsets = part_offsets(parse(blocks[0]))

    def parts(self, item: int) -> tuple[int, ...]:
        return self._offsets

    def read(self, item: int, start: int, stop: int) -> memoryview:
        return self._blocks[item][start:stop]


class _Serving:
    """A `Service` with one stored context that accepts nothing."""

    encoder = None

    def __init__(self, blocks: dict[bytes, bytes]) -> None:
        self._blocks = blocks

    def admit(self, user: str, node: bytes, spaces: Sequence[bytes]) -> Grant:
        return Grant(user, _SALT)

    def forget(self, tenant: str, keys: Sequence[bytes]) -> int:
        return 0

    def match(self, tenant: str, space: bytes, keys: Sequence[bytes]) -> MatchResult:
        return MatchResult(len(keys), len(keys))

    def open_fetch(self, tenant: str, space: bytes, keys: Sequence[bytes], *, state: bool) -> _Stored:
        return _Stored([self._blocks[key] for key in keys])

    def snapshot(self, tenant: str) -> tuple[int, Sequence[bytes]]:
        return 1, ()

    def withdrawn(self, tenant: str) -> bytes:
        return b""

    def changes(self, tenant: str, since: int) -> tuple[int, Sequence[bytes], Sequence[bytes]]:
        return since, (), ()

    def open_put(self, *args: Any, **options: Any) -> Any:
        raise EngineError("a bench gives and does not take")

    def open_prefill(self, *args: Any, **options: Any) -> Any:
        raise EngineError("a bench does not compute")


class _Sink(FetchBuffer):
    """Counts what arrives and drops it; ``sizes``: of the payloads."""

    total = 0
    sizes: list[int]

    def write(self, pieces: Sequence[Piece], payload: memoryview) -> int:
        self.received += len(payload)
        self.sizes.append(len(payload))
        if self.received >= self.total:
            self.end("")
        return len(payload)


def serve(blocks: str, folder: str) -> None:
    """The other process: both servers and both bare senders, until standard input ends.

    Prints its addresses as JSON; a line of JSON, [way, sizes of frames], makes a bare sender send.
    """
    context = _Context(int(blocks))
    blocks_by_key = dict(zip(context.keys, context.sealed(), strict=True))
    memory = memoryview(b"".join(blocks_by_key.values()))
    pair = KeyPair.new()
    auth = ServerAuth(pair, AllowList(Path(folder) / "allow.toml"))
    sockets: dict[str, Any] = {}
    with (
        BusServer(_Serving(blocks_by_key), limits=_LIMITS) as plain,
        BusServer(_Serving(blocks_by_key), auth=auth, limits=_LIMITS) as curve,
        zmq.Context() as bare,
    ):
        addresses = {"bus plain": plain.endpoint, "bus curve": curve.endpoint, "key": pair.public.hex()}
        for way in ("plain", "curve"):
            for name, kind in (("push", zmq.PUSH), ("reply", zmq.REP)):
                socket = sockets[f"{name} {way}"] = bare.socket(kind)
                socket.linger, socket.sndhwm = 0, SEND_QUEUE
                if way == "curve":
                    socket.curve_server, socket.curve_secretkey = True, pair.secret
                socket.bind("tcp://127.0.0.1:0")
                addresses[f"{name} {way}"] = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        ends = threading.Event()
        replies = [sockets.pop(f"reply {way}") for way in ("plain", "curve")]
        replier = threading.Thread(target=_reply, args=(replies, memory, ends))
        replier.start()
        print(json.dumps(addresses), flush=True)
        for line in sys.stdin:
            way, sizes = json.loads(line)
            push, at = sockets[f"push {way}"], 0
            for size in sizes:
                push.send(memory[at : at + size], copy=size < COPY_BELOW)
                at += size
        ends.set()
        replier.join()
        for socket in sockets.values():
            socket.close(0)


def _reply(sockets: Sequence[Any], memory: memoryview, ends: threading.Event) -> None:
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    while not ends.is_set():
        for socket, _ in poller.poll(100):
            size = int(socket.recv())
            socket.send(memory[:size], copy=False)
    for socket in sockets:
        socket.close(0)


class _Ways:
    """Everything that is measured, over one way (plain or curve)."""

    def __init__(self, way: str, context: _Context, child: Any, addresses: dict[str, str], device: KeyPair) -> None:
        self.way, self.context, self._child = way, context, child
        keys: dict[str, Any] = {}
        if way == "curve":
            keys = {"keys": device, "server_key": bytes.fromhex(addresses["key"])}
        self.client = BusClient(addresses[f"bus {way}"], ClientOptions(limits=_LIMITS, **keys))
        self._bare: zmq.Context[Any] = zmq.Context()
        self.pull, self.ask = self._bare.socket(zmq.PULL), self._bare.socket(zmq.REQ)
        for socket, name in ((self.pull, "push"), (self.ask, "reply")):
            socket.linger, socket.rcvhwm = 0, SEND_QUEUE
            if way == "curve":
                socket.curve_publickey, socket.curve_secretkey = device.public, device.secret
                socket.curve_serverkey = keys["server_key"]
            socket.connect(addresses[f"{name} {way}"])
        deadline = time.monotonic() + _WAIT
        while self.client.state != "up":
            if time.monotonic() > deadline:
                raise EngineError(f"the bench's link did not come up: {self.client.reason}")
            time.sleep(0.01)

    def fetch(self, payload: int, total: int, *, sink: bool, order: Any = "tail") -> list[int]:
        """One fetch of the whole context; the sizes of the payloads that a sink got."""
        kind = _Sink if sink else FetchBuffer
        context = self.context
        fetch = kind(FetchRequest(context.space, context.tokens, order=order), context.keys)
        if isinstance(fetch, _Sink):
            fetch.total, fetch.sizes = total, []
        self.client.fill(fetch, payload=payload, window=SEND_QUEUE)
        with fetch._changed:
            fetch._changed.wait_for(lambda: fetch.ended is not None, _WAIT)
        if fetch.ended != "":
            raise EngineError(f"a fetch of the bench ended: {fetch.ended}")
        return fetch.sizes if isinstance(fetch, _Sink) else []

    def push(self, sizes: list[int], *, keep: bool) -> None:
        """Frames of these sizes through PUSH and PULL."""
        self._child.stdin.write(json.dumps([self.way, sizes]) + "\n")
        self._child.stdin.flush()
        room, at = np.empty(sum(sizes), np.uint8).data if keep else None, 0
        for size in sizes:
            frame = self.pull.recv(copy=False)
            if room is not None:
                room[at : at + size] = frame.buffer
                at += size

    def one(self) -> None:
        """A fetch of one block."""
        context = self.context
        fetch = self.client.fetch(FetchRequest(context.space, context.tokens[:_TOKENS]), context.keys[:1])
        if fetch.tail(1, _WAIT) != 1:
            raise EngineError(f"a fetch of the bench ended: {fetch.ended}")

    def reply(self, size: int) -> None:
        """A request, and a reply of one frame that is copied into fresh memory, as a fetch does."""
        self.ask.send(b"%d" % size)
        frame = self.ask.recv(copy=False)
        np.empty(size, np.uint8).data[:] = frame.buffer

    def close(self) -> None:
        self.client.close()
        self.pull.close(0)
        self.ask.close(0)
        self._bare.term()


@contextmanager
def _started(blocks: int) -> Iterator[list[_Ways]]:
    context, device = _Context(blocks), KeyPair.new()
    with TemporaryDirectory(prefix="ctxreuse-bench-") as folder:
        added = datetime.fromtimestamp(SYSTEM_CLOCK.now(), UTC)
        AllowList(Path(folder) / "allow.toml").allow(Allowed("bench", device.public, "bench", added))
        code = "import sys; from ctxreuse.bench.link import serve; serve(*sys.argv[1:])"
        command = [sys.executable, "-c", code, str(blocks), folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            ways: list[_Ways] = []
            try:
                addresses = json.loads(child.stdout.readline() or "{}")
                if not addresses:
                    raise EngineError("the bench's other process did not start")
                for way in ("plain", "curve"):
                    ways.append(_Ways(way, context, child, addresses, device))
                yield ways
            finally:
                for each in ways:
                    each.close()
                child.stdin.close()


def _turns(calls: dict[str, Callable[[], object]], rounds: int, warm: int = 2) -> dict[str, list[float]]:
    """Seconds of each call of each round; the calls take turns, each round the other way round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-warm, rounds):
        for name in list(calls) if turn % 2 else list(calls)[::-1]:
            start = time.perf_counter()
            calls[name]()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def _measured(way: _Ways, blocks: int, rounds: int, ones: int, step: Callable[[str], None]) -> Iterator[Figure]:
    """All figures of one way."""
    block = next(_Context(1).sealed())
    total = blocks * len(block)

    def rates(payload: int, *, sink: bool, order: str) -> tuple[float, float]:
        # The bare sender sends frames of just the sizes that a fetch has.
        sizes = way.fetch(payload, total, sink=True, order=order)
        times = _turns(
            {
                "bus": lambda: way.fetch(payload, total, sink=sink, order=order),
                "raw": lambda: way.push(sizes, keep=not sink),
            },
            rounds,
        )
        return total / statistics.median(times["bus"]) / 1e9, total / statistics.median(times["raw"]) / 1e9

    for name, payload in _SIZES.items():
        step(f"{way.way}, payloads of {name}")
        bus, raw = rates(payload, sink=True, order="tail")
        bar = 0.8 * raw if payload >= 1 << 20 else None
        note = "into a sink that drops; peer: PUSH/PULL with the same frames" + "; bar: 0.8 of it" * (bar is not None)
        yield Figure(metric=f"{way.way}_{name}", value=bus, unit="GB/s", peer=raw, bar=bar, note=note)
    step(f"{way.way}, into memory")
    bus, raw = rates(1 << 20, sink=False, order="layers")
    note = "1MiB, in layer order, into an Assembly; peer: PUSH/PULL, copied into fresh memory"
    yield Figure(metric=f"{way.way}_into_memory", value=bus, unit="GB/s", peer=raw, note=note)
    step(f"{way.way}, one block")
    times = _turns({"bus": way.one, "raw": lambda: way.reply(len(block))}, ones)
    note = f"{len(block) / 1e6:.1f} MB; peer: REQ/REP with one frame, copied into fresh memory"
    for percent in (50, 99):
        bus, raw = (float(np.percentile(times[name], percent)) * 1e3 for name in ("bus", "raw"))
        metric = f"{way.way}_one_block_p{percent}"
        yield Figure(metric=metric, value=bus, unit="ms", peer=raw, better="lower", note=note)


def run(options: Options) -> list[Figure]:
    """Figures in GB/s (10^9 bytes of blocks a second) and ms; medians and percentiles of paired rounds."""
    blocks, rounds, ones = options.pick(16, 64), options.pick(5, 21), options.pick(40, 400)
    with _started(blocks) as ways:
        return [figure for way in ways for figure in _measured(way, blocks, rounds, ones, options.step)]
