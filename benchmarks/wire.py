"""Gets of KV that another process on this machine has: by the bus, by the store's map, and by other software.

Values of 64 KiB, 1 MiB and 3 MiB, one at a time and 16 at once; medians, in GB/s. Ours are blocks of 64 tokens in a
cloud's store on disk, in the page cache: ``bus`` fetches them over loopback TCP (ZeroMQ, with the protocol's checks of
heads and token ids), ``map`` opens the same store beside the process that writes it and copies the planes out of shared
pages, as an engine does that shares a node's store. Where ``CTXREUSE_PEERS`` names a Python with Mooncake
(``mooncake-transfer-engine-non-cuda``) or LMCache, these are the peers: Mooncake's store over TCP into registered
memory, and LMCache's server with its own client (``lmcache bench server``: shared memory, the copy only, without the
lookup before it); both hold values in memory. Bound of ``bus``: the same bytes over a plain socket, after requests of
8 bytes; of ``map``: a copy in memory. Ours is measured before and after the peers.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.children import Child, sidecar
from benchmarks.rivals.wires import BATCH, lmcache_seconds, mooncake_seconds
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.block.format import BlockWriter, block_layout
from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transport import BusClient, ClientOptions
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import ROOT, as_tokens, prefix_keys
from ctxreuse.identity.model import LayerSpec, ModelSpace
from ctxreuse.store import TieredStore, open_store

__all__ = ["SIZES", "Ours", "PlainSocket", "figures_of", "nbytes_of", "run"]

_TOKENS, _HEAD, _WAIT, _PAYLOAD = 64, 64, 60.0, 4 << 20
#: Heads and layers whose keys and values of 64 tokens, in 16 bits, have so many bytes.
SIZES: Final = {"64 KiB": (1, 4), "1 MiB": (2, 32), "3 MiB": (6, 32)}


def nbytes_of(heads: int, layers: int) -> int:
    """Bytes of a block."""
    return 2 * 2 * _TOKENS * _HEAD * heads * layers


def _space(heads: int, layers: int) -> ModelSpace:
    return ModelSpace(
        weights="0" * 64, architecture="bench", tokenizer="0" * 64, dtype="bfloat16",
        layers=(LayerSpec("full", kv_heads=heads, k_dim=_HEAD, v_dim=_HEAD),) * layers, rope="{}", vocab_size=50_000,
        max_tokens=1 << 20, block_tokens=_TOKENS,
    )  # fmt: skip


class Ours:
    """A context of 16 blocks in the store of another process, in ``folder``; read by the bus or by the map."""

    def __init__(self, stack: ExitStack, folder: Path, heads: int, layers: int) -> None:
        self._space, self.nbytes = _space(heads, layers), nbytes_of(heads, layers)
        self._tokens = as_tokens(np.random.default_rng(heads * layers).integers(0, 50_000, BATCH * _TOKENS))
        cloud = stack.enter_context(sidecar(folder))
        options = ClientOptions(spaces=[self._space.digest])
        self._client = stack.enter_context(BusClient(cloud.said, options))
        until = time.monotonic() + _WAIT
        while self._client.state != "up" or self._client.welcome is None:
            if time.monotonic() > until:
                raise EngineError(f"the bench's link did not come up: {self._client.reason}")
            time.sleep(0.01)
        self._keys = prefix_keys(self._space.digest, self._client.welcome.salt, self._tokens, _TOKENS)
        blocks = self.sealed()
        request = PutRequest(self._space.digest, self._keys, [len(block) for block in blocks])
        self._client.put(request, blocks.__getitem__, timeout=_WAIT)
        self._store = stack.enter_context(self._opened(folder / "store", until + _WAIT))
        #: Where `map` copies to.
        self.room = np.empty(BATCH * self.nbytes, np.uint8)

    def _opened(self, folder: Path, until: float) -> TieredStore:
        """Open the store beside its writer, which writes when it likes."""
        while True:
            store = open_store(folder, readonly=True)
            if store.match(self._keys).blocks == BATCH:
                return store
            store.close()
            if time.monotonic() > until:
                raise EngineError("the bench's blocks are not in the store", where=str(folder))
            time.sleep(0.1)

    def sealed(self) -> list[memoryview]:
        """Return the blocks, all with the same noise."""
        layout, parent, found = block_layout(self._space), ROOT, list[memoryview]()
        rng = np.random.default_rng(0)
        for number, key in enumerate(self._keys):
            end = (number + 1) * _TOKENS
            ids = self._tokens[end - _TOKENS : end]
            writer = BlockWriter(
                layout, kind="block", space=self._space.digest, key=key, parent=parent, end=end, tokens=ids
            )
            for plane in layout.planes:
                writer.plane(plane.layer, plane.role)[:] = rng.integers(0, 256, plane.nbytes, np.uint8)
            found.append(memoryview(writer.seal().tobytes()))
            parent = key
        return found

    def bus(self, first: int, count: int) -> None:
        """Fetch blocks into fresh memory."""
        stop = first + count
        request = FetchRequest(self._space, self._tokens[: stop * _TOKENS], first=first, order="tail")
        fetch = self._client.fetch(request, self._keys[:stop], payload=_PAYLOAD)  # as `Clouds` asks for on a fast link
        if fetch.tail(count, _WAIT) != count:
            raise EngineError(f"a fetch of the bench ended: {fetch.ended}")

    def map(self, first: int, count: int) -> None:
        """Copy blocks out of the store's map."""
        at = 0
        with self._store.read() as reader:
            for number in range(first, first + count):
                ids = self._tokens[number * _TOKENS : (number + 1) * _TOKENS]
                view = reader.block(self._keys[number], ids, self._space.digest)
                if view is None:
                    raise EngineError("a block of the bench is gone")
                begin = int(view.spans[0, 0])
                end = begin + self.nbytes
                self.room[at : at + self.nbytes] = np.frombuffer(view.buffer[begin:end], np.uint8)
                at += self.nbytes


class PlainSocket:
    """A plain TCP connection to a process that sends as many bytes as it is asked for."""

    def __init__(self, stack: ExitStack) -> None:
        child = stack.enter_context(Child("benchmarks.wire"))
        self._socket = stack.enter_context(socket.create_connection(("127.0.0.1", int(child.said))))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.room = memoryview(bytearray(BATCH * max(nbytes_of(*shape) for shape in SIZES.values())))

    def get(self, nbytes: int) -> None:
        """Ask for so many bytes, and take them."""
        self._socket.sendall(nbytes.to_bytes(8, "little"))
        at = 0
        while at < nbytes:
            at += self._socket.recv_into(self.room[at:nbytes])


def _copied(nbytes: int) -> Callable[[], None]:
    source, room = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)

    def copy() -> None:
        room[:] = source

    return copy


def _median(call: Callable[[int], object], rounds: int) -> float:
    """Seconds of a call, which is given numbers of rounds."""
    times = []
    for number in range(-2, rounds):
        began = time.perf_counter()
        call(number % BATCH)
        if number >= 0:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def run(options: Options) -> list[Figure]:
    """Ours and the peers, size by size."""
    python = os.environ.get("CTXREUSE_PEERS", "")
    beside = {name: bool(python) and Path(python).with_name(name).exists() for name in ("mooncake_master", "lmcache")}
    figures, rounds = list[Figure](), options.pick(8, 100)
    for step, (size, (heads, layers)) in enumerate(SIZES.items()):
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as folder:
            options.step(size, step, len(SIZES))
            ours, plain = Ours(stack, Path(folder), heads, layers), PlainSocket(stack)
            first = _ours(ours, plain, rounds)
            peers: dict[str, dict[str, float]] = {}
            try:
                if beside["mooncake_master"]:
                    options.step(f"{size}, Mooncake", step, len(SIZES))
                    peers["Mooncake"] = mooncake_seconds(python, ours.nbytes, max(rounds // BATCH, 1))
                if beside["lmcache"]:
                    options.step(f"{size}, LMCache", step, len(SIZES))
                    peers["LMCache"] = lmcache_seconds(python, _TOKENS, heads, layers, max(rounds // 4, 4))
            except (RuntimeError, OSError) as error:
                raise EngineError(f"a peer of the bench failed: {error}", where=python) from None
            options.step(size, step, len(SIZES))
            again = _ours(ours, plain, rounds)
            figures += figures_of(size, ours.nbytes, [first, again], peers)
    return figures


def _ours(ours: Ours, plain: PlainSocket, rounds: int) -> dict[tuple[str, str], float]:
    found = {}
    for kind, count in (("single", 1), ("batch", BATCH)):
        nbytes, times = count * ours.nbytes, max(rounds // count, 4)
        calls: dict[str, Callable[[int], object]] = {
            "bus": partial(_read, ours.bus, count),
            "map": partial(_read, ours.map, count),
            "socket": partial(_again, partial(plain.get, nbytes)),
            "copy": partial(_again, _copied(nbytes)),
        }
        for way, call in calls.items():
            found[kind, way] = _median(call, times)
    return found


def _read(way: Callable[[int, int], None], count: int, number: int) -> None:
    """Read one block, another one each time, or all."""
    way(number if count == 1 else 0, count)


def _again(call: Callable[[], None], number: int) -> None:
    call()


def figures_of(
    size: str, nbytes: int, runs: Sequence[dict[tuple[str, str], float]], peers: dict[str, dict[str, float]]
) -> list[Figure]:
    """Rates of one size; the bar is the best peer's."""
    made = []
    for kind, count in (("single", 1), ("batch", BATCH)):
        total = count * nbytes / 1e9
        rates = {way: total / statistics.median(run[kind, way] for run in runs) for way in ("bus", "map")}
        bounds = {way: total / min(run[kind, way] for run in runs) for way in ("socket", "copy")}
        others = {name: total / seconds[kind] for name, seconds in peers.items()}
        best = max(others, key=lambda name: others[name]) if others else ""
        listed = "; ".join(f"{name} {rate:.3g} GB/s" for name, rate in others.items())
        for way, bound in (("bus", "socket"), ("map", "copy")):
            made.append(
                Figure(
                    metric=f"{size}, {'16 at once' if count > 1 else 'single'}, {way}",
                    value=rates[way],
                    unit="GB/s",
                    peer=others[best] if best else None,
                    bound=bounds[bound],
                    bar=others[best] if best else None,
                    note=f"{1e6 * total / rates[way]:.0f}e-6 s; bound: a {'plain socket' if way == 'bus' else 'copy'}"
                    + (f"; {listed}" if listed else ""),
                )
            )
    return made


def main() -> None:
    """Send as many bytes as each request of 8 bytes asks for, to one caller; prints its port, ends with its input."""
    import threading

    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        room = memoryview(bytes(BATCH * max(nbytes_of(*shape) for shape in SIZES.values())))

        def serve() -> None:
            caller, _ = server.accept()
            with caller:
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while len(asked := caller.recv(8, socket.MSG_WAITALL)) == 8:
                    caller.sendall(room[: int.from_bytes(asked, "little")])

        threading.Thread(target=serve, daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
