"""Writing blocks to disk and reading them into an engine's memory, against raw LMDB and plain memory copies.

Blocks have the shape of a 135M model in float32 (30 layers, 3 heads of 64, 64 tokens: 2.9 MB). Reading means all that
a request does: match, get, parse, compare identity, verify every checksum, scatter into tensors [heads, tokens, dim].
Like an engine, it takes turns at the layers with two threads. Raw LMDB gets and copies the same values, unverified, in
one thread; memcpy copies the same bytes from memory to memory. "First" is the first read of a new process whose file
is still in the system's page cache.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from ctxreuse.bench.measure import Options, aligned, fresh, paired
from ctxreuse.bench.report import Figure
from ctxreuse.block.format import BlockView, BlockWriter, Plane, layout_of
from ctxreuse.identity.keys import ROOT, SALT_BYTES, as_tokens, prefix_keys
from ctxreuse.kernels import scatter_checked
from ctxreuse.store import BlockStore

__all__ = ["Load", "first_read", "run"]

_LAYERS, _HEADS, _DIM, _BLOCK = 30, 3, 64, 64
_PLANES = tuple(Plane(i, role, "float32", (_HEADS, _BLOCK, _DIM)) for i in range(_LAYERS) for role in ("k", "v"))
_LAYOUT, _SPACE = layout_of(_PLANES), b"bench-store".ljust(32)
_THREADS = 2


class Load:
    """The keys of one context of ``blocks`` blocks and the tensors it is read into, their pages present."""

    def __init__(self, blocks: int) -> None:
        self.tokens = as_tokens(np.arange(blocks * _BLOCK))
        self.keys = prefix_keys(_SPACE, bytes(SALT_BYTES), self.tokens, _BLOCK)
        self.nbytes = blocks * sum(plane.nbytes for plane in _PLANES)
        self.tensors = [aligned(_HEADS, blocks * _BLOCK, _DIM) for _ in _PLANES]

    def of(self, i: int) -> Any:
        """Token ids of block ``i``."""
        return self.tokens[i * _BLOCK : (i + 1) * _BLOCK]

    def sealed(self) -> list[Any]:
        """Every block's bytes, filled with noise that does not compress."""
        random, parent, sealed = np.random.default_rng(0), ROOT, []
        for i, key in enumerate(self.keys):
            ends = (i + 1) * _BLOCK
            writer = BlockWriter(
                _LAYOUT, kind="block", space=_SPACE, key=key, parent=parent, end=ends, tokens=self.of(i)
            )
            for plane in _PLANES:
                writer.plane(plane.layer, plane.role)[:] = random.integers(0, 256, plane.nbytes, np.uint8)
            sealed.append(writer.seal())
            parent = key
        return sealed

    def read(self, store: BlockStore, threads: ThreadPoolExecutor | None = None) -> None:
        """Everything a request does to have this context in its tensors. Raises AssertionError on a miss."""
        assert store.match(self.keys).blocks == len(self.keys)
        with store.read() as reader:
            views = [view for i, key in enumerate(self.keys) if (view := reader.block(key, self.of(i), _SPACE))]
            assert len(views) == len(self.keys)
            each = threads.map if threads is not None else map
            for _ in each(partial(self._import, views), _PLANES, self.tensors):
                pass

    def _import(self, views: list[BlockView], plane: Plane, tensor: Any) -> None:
        strides = (len(self.tokens) * _DIM, _DIM)
        counts = [_BLOCK] * len(views)
        buffers = [view.buffer for view in views]
        offsets = [view.offset(plane.layer, plane.role) for view in views]
        sums = [view.checksum(plane.layer, plane.role) for view in views]
        bad = scatter_checked(tensor, "float32", 0, strides, buffers, offsets, "float32", _HEADS, _DIM, counts, sums)
        assert bad == -1

    def raw(self, env: Any, table: Any, into: Any) -> None:
        """The same values out of LMDB, copied one after another and not looked at."""
        at = 0
        with env.begin(buffers=True) as txn:
            for key in self.keys:
                value = np.frombuffer(txn.get(key, db=table), np.uint8)
                into[at : at + value.nbytes] = value
                at += value.nbytes


def _raw_env(folder: Path, *, readonly: bool = False) -> tuple[Any, Any]:
    env = lmdb.open(
        str(folder), map_size=1 << 38, max_dbs=8, sync=False, metasync=False, readonly=readonly, create=not readonly
    )
    return env, env.open_db(b"blocks", create=not readonly)


def _room(blocks: int) -> Any:
    return np.ones(blocks * ((_LAYOUT.nbytes >> 12) + 4 << 12), np.uint8)


def first_read(path: str, blocks: str, way: str) -> float:
    """Seconds of one read in this process, the first one if it is new. ``way``: ours, raw or memcpy."""
    load, folder = Load(int(blocks)), Path(path)
    room, source = _room(int(blocks)), np.ones(load.nbytes, np.uint8)
    if way == "ours":
        with BlockStore.open(folder, readonly=True) as store, ThreadPoolExecutor(_THREADS) as threads:
            # A pool starts its threads at the first use.
            list(threads.map(time.sleep, [0.01] * _THREADS))
            seconds = _timed(lambda: load.read(store, threads))
    elif way == "raw":
        env, table = _raw_env(folder / "blocks", readonly=True)
        seconds = _timed(lambda: load.raw(env, table, room))
        env.close()
    else:
        seconds = _timed(lambda: np.copyto(room[: load.nbytes], source))
    return seconds


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _put(load: Load, sealed: list[Any], folder: Path) -> float:
    """Seconds to put and commit everything; opening and closing are not counted."""
    with BlockStore.open(folder, capacity=1 << 34) as store:

        def work() -> None:
            for key, data in zip(load.keys, sealed, strict=True):
                assert store.put(key, data, wait=60)
            store.flush()

        return _timed(work)


def _put_raw(load: Load, sealed: list[Any], folder: Path) -> float:
    folder.mkdir()
    env, table = _raw_env(folder)

    def work() -> None:
        for first in range(0, len(sealed), 64):
            with env.begin(write=True) as txn:
                for key, data in zip(load.keys[first : first + 64], sealed[first : first + 64], strict=True):
                    txn.put(key, data, db=table)

    try:
        return _timed(work)
    finally:
        env.close()


def run(options: Options) -> list[Figure]:
    """Figures in GB/s (10^9 bytes of KV a second); medians of paired rounds."""
    blocks, rounds = options.pick(8, 32), options.pick(3, 11)
    load = Load(blocks)
    sealed = load.sealed()
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as place:
        home, names = Path(place), count()
        puts: dict[str, list[float]] = {"ours": [], "raw": []}
        options.step("writing into new stores")
        for turn in range(-1, rounds):
            for way, put in (("ours", _put), ("raw", _put_raw)) if turn % 2 else (("raw", _put_raw), ("ours", _put)):
                spot = home / f"put{next(names)}"
                spent = put(load, sealed, spot)
                if turn >= 0:  # the warm-up's stay: they are read below
                    puts[way].append(spent)
                    # Dropping what is not yet on the disk keeps its writing out of the next round.
                    shutil.rmtree(spot)
        wrote = {way: statistics.median(spent) for way, spent in puts.items()}
        store_home = home / "put0"
        options.step("reading in a process that has read before")
        raw, table = _raw_env(home / "put1")
        room, source = _room(blocks), np.concatenate(sealed)[: load.nbytes]
        half = load.nbytes // 2
        with BlockStore.open(store_home) as store, ThreadPoolExecutor(_THREADS) as threads:
            warm = paired(
                {
                    "ours": lambda: load.read(store, threads),
                    "one": lambda: load.read(store),
                    "raw": lambda: load.raw(raw, table, room),
                    "memcpy": lambda: np.copyto(room[: load.nbytes], source),
                    "both": lambda: list(
                        threads.map(np.copyto, (room[:half], room[half : load.nbytes]), (source[:half], source[half:]))
                    ),
                },
                rounds=3 * rounds,
                warm=2,
            )
        raw.close()
        options.step("first reads of fresh processes")
        firsts: dict[str, list[float]] = {"ours": [], "raw": [], "memcpy": []}
        for _ in range(rounds):
            for way, times in firsts.items():
                times.append(fresh(first_read, store_home, blocks, way))
    first = {way: statistics.median(spent) for way, spent in firsts.items()}

    def rate(seconds: float) -> float:
        return load.nbytes / seconds / 1e9

    return [
        Figure(
            metric="put",
            value=rate(wrote["ours"]),
            unit="GB/s",
            peer=rate(wrote["raw"]),
            bar=0.8 * rate(wrote["raw"]),
            note="peer: raw LMDB; bar: 0.8 of it",
        ),
        Figure(
            metric="read",
            value=rate(warm["ours"]),
            unit="GB/s",
            peer=rate(warm["raw"]),
            bound=rate(warm["both"]),
            bar=0.6 * rate(warm["memcpy"]),
            note="two threads; peer: raw LMDB; bound: memcpy by two threads; bar: 0.6 of memcpy by one",
        ),
        Figure(
            metric="read_single",
            value=rate(warm["one"]),
            unit="GB/s",
            peer=rate(warm["raw"]),
            bound=rate(warm["memcpy"]),
            note="peer: raw LMDB; bound: memcpy by one thread",
        ),
        Figure(
            metric="first_read",
            value=rate(first["ours"]),
            unit="GB/s",
            peer=rate(first["raw"]),
            bound=rate(first["memcpy"]),
            note="two threads, new process; peer: raw LMDB; bound: memcpy by one thread",
        ),
    ]
