"""Writing blocks to disk and reading them into an engine's memory, against raw LMDB and plain memory copies.

Blocks have the shape of a 135M model in float32 (30 layers, 3 heads of 64, 64 tokens: 2.9 MB). Reading means all that
a request does: match, get, parse, compare identity, verify every checksum, scatter into tensors [heads, tokens, dim].
Raw LMDB gets and copies the same values, unverified; memcpy copies the same bytes from memory to memory. "Fresh" is
the first read of a new process whose file is still in the system's page cache.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from ctxreuse.bench.measure import Options, fresh, paired
from ctxreuse.bench.report import Figure
from ctxreuse.block import BlockWriter, Plane, layout_of
from ctxreuse.kernels import scatter_run
from ctxreuse.keys import ROOT, SALT_BYTES, as_tokens, prefix_keys
from ctxreuse.store import BlockStore

__all__ = ["Load", "first_read", "run"]

_LAYERS, _HEADS, _DIM, _BLOCK = 30, 3, 64, 64
_PLANES = tuple(Plane(i, role, "float32", (_HEADS, _BLOCK, _DIM)) for i in range(_LAYERS) for role in ("k", "v"))
_LAYOUT, _SPACE = layout_of(_PLANES), b"bench-store".ljust(32)
_FRESH = "import sys; from ctxreuse.bench.store import first_read; first_read(*sys.argv[1:])"


class Load:
    """The keys of one context of ``blocks`` blocks and the tensors it is read into, their pages present."""

    def __init__(self, blocks: int) -> None:
        self.tokens = as_tokens(np.arange(blocks * _BLOCK))
        self.keys = prefix_keys(_SPACE, bytes(SALT_BYTES), self.tokens, _BLOCK)
        self.nbytes = blocks * sum(plane.nbytes for plane in _PLANES)
        self.tensors = [np.zeros((_HEADS, blocks * _BLOCK, _DIM), np.uint32) for _ in _PLANES]
        for tensor in self.tensors:
            tensor.fill(1)

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

    def read(self, store: BlockStore) -> None:
        """Everything a request does to have this context in its tensors. Raises AssertionError on a miss."""
        assert store.match(self.keys).blocks == len(self.keys)
        with store.read() as reader:
            views = [view for i, key in enumerate(self.keys) if (view := reader.block(key, self.of(i), _SPACE))]
            assert len(views) == len(self.keys)
            strides = (len(self.tokens) * _DIM, _DIM)
            offsets, counts = [0] * len(views), [_BLOCK] * len(views)
            for plane, tensor in zip(_PLANES, self.tensors, strict=True):
                planes = [view.plane(plane.layer, plane.role) for view in views]
                scatter_run(tensor, "float32", 0, strides, planes, offsets, "float32", _HEADS, _DIM, counts)

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


def first_read(path: str, blocks: str, way: str) -> None:
    """One read in this process, the first one if it is new; prints its seconds. ``way``: ours, raw or memcpy."""
    load, folder = Load(int(blocks)), Path(path)
    room, source = _room(int(blocks)), np.ones(load.nbytes, np.uint8)
    if way == "ours":
        with BlockStore.open(folder, readonly=True) as store:
            seconds = _timed(lambda: load.read(store))
    elif way == "raw":
        env, table = _raw_env(folder / "blocks", readonly=True)
        seconds = _timed(lambda: load.raw(env, table, room))
        env.close()
    else:
        seconds = _timed(lambda: np.copyto(room[: load.nbytes], source))
    print(json.dumps(seconds))


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
                spent = put(load, sealed, home / f"put{next(names)}")
                if turn >= 0:
                    puts[way].append(spent)
        wrote = {way: statistics.median(spent) for way, spent in puts.items()}
        store_home = home / "put0"
        options.step("reading in a process that has read before")
        raw, table = _raw_env(home / "put1")
        room, source = _room(blocks), np.concatenate(sealed)[: load.nbytes]
        with BlockStore.open(store_home) as store:
            warm = paired(
                {
                    "ours": lambda: load.read(store),
                    "raw": lambda: load.raw(raw, table, room),
                    "memcpy": lambda: np.copyto(room[: load.nbytes], source),
                },
                rounds=3 * rounds,
                warm=2,
            )
        raw.close()
        options.step("first reads of fresh processes")
        firsts: dict[str, list[float]] = {"ours": [], "raw": [], "memcpy": []}
        for _ in range(rounds):
            for way, times in firsts.items():
                times.append(fresh(_FRESH, store_home, blocks, way))
    first = {way: statistics.median(spent) for way, spent in firsts.items()}
    return [
        _figure("put", load.nbytes, wrote["ours"], raw=wrote["raw"], share=0.8, of="raw LMDB"),
        _figure("read", load.nbytes, warm["ours"], raw=warm["raw"], memcpy=warm["memcpy"], share=0.6, of="memcpy"),
        _figure("first_read", load.nbytes, first["ours"], raw=first["raw"], memcpy=first["memcpy"]),
    ]


def _figure(
    metric: str, nbytes: int, seconds: float, *, raw: float, memcpy: float | None = None, share: float = 0, of: str = ""
) -> Figure:
    rates = [nbytes / spent / 1e9 if spent else None for spent in (seconds, raw, memcpy)]
    value, peer, bound = rates
    against = bound if bound is not None else peer
    note = f"peer: raw LMDB{', bound: memcpy' if memcpy else ''}{f'; bar: {share} of {of}' if share else ''}"
    bar = share * against if share and against is not None else None
    return Figure(metric=metric, value=value or 0.0, unit="GB/s", peer=peer, bound=bound, bar=bar, note=note)
