"""Opening a store of many small blocks, and listing many sessions: what a start and a page cost, in time and memory."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import lmdb

from ctxreuse.bench.measure import Options, fresh
from ctxreuse.bench.report import Figure
from ctxreuse.errors import SessionError
from ctxreuse.identity.keys import ROOT
from ctxreuse.store import BlockStore, Ledger, NewTurn, Session
from ctxreuse.store.ledger.records import encode_session
from ctxreuse.store.lmdb.records import Record, footprint

__all__ = ["fill_blocks", "open_blocks", "run"]

#: Blocks of a context, of which the first are shared by some of them; tokens of a block; bytes of its value.
_CONTEXT, _SHARED, _SHARERS, _TOKENS, _VALUE = 32, 8, 16, 64, 2100
_CAPACITY = 1 << 40


def fill_blocks(folder: Path, blocks: int) -> None:
    """Make a store of so many entries at once: true records, values that nobody reads."""
    BlockStore.open(folder, capacity=_CAPACITY).close()
    rows: dict[bytes, bytes] = {}
    contexts = list(range(blocks // (_CONTEXT - _SHARED + _SHARED // _SHARERS) + 1))
    Random(0).shuffle(contexts)
    for turn, context in enumerate(contexts):
        parent = ROOT
        for i in range(_CONTEXT):
            owner = context // _SHARERS if i < _SHARED else -1 - context
            key, used = hashlib.sha256(b"%d %d" % (owner, i)).digest(), (turn + 1) * _CONTEXT - i
            rows[key] = Record(parent, _TOKENS, (i + 1) * _TOKENS, footprint(_VALUE), 0, used).pack()
            parent = key
    value, ordered = bytes(_VALUE), sorted(rows.items())
    with lmdb.open(str(folder / "blocks"), max_dbs=8, map_size=1 << 36, sync=False, metasync=False) as env:
        tables = {name: env.open_db(name) for name in (b"meta", b"blocks")}
        for at in range(0, len(ordered), 50_000):
            with env.begin(write=True) as txn:
                for key, record in ordered[at : at + 50_000]:
                    txn.put(key, record, db=tables[b"meta"], append=True)
                    txn.put(key, value, db=tables[b"blocks"], append=True)


def _anonymous() -> int:
    """Bytes of this process's own memory, without mapped files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def open_blocks(folder: str) -> dict[str, float]:
    """Open a store and say how long that took, of it on a processor, and how much memory each entry takes."""
    gc.collect()
    before, start, spent = _anonymous(), time.perf_counter(), time.process_time()
    store = BlockStore.open(folder, capacity=_CAPACITY)
    seconds, spent = time.perf_counter() - start, time.process_time() - spent
    gc.collect()
    blocks, memory = store.stats().blocks, _anonymous() - before
    store.close()
    return {"blocks": blocks, "seconds": seconds, "processor": spent, "memory": memory / max(blocks, 1)}


def _milliseconds(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _misspelt(ledger: Ledger) -> None:
    with contextlib.suppress(SessionError):
        ledger.session("crawl 00O017")


def _fill_sessions(folder: Path, count: int) -> None:
    """Make so many sessions at once, as a program does that does not know their order."""
    with Ledger.open(folder) as ledger:
        head = ledger.append(ledger.create("trunk").id, [NewTurn("user", "x")])[0].id
    with lmdb.open(str(folder / "ledger"), max_dbs=8, map_size=1 << 36) as env:
        sessions, names = env.open_db(b"sessions"), env.open_db(b"names")
        with env.begin(write=True) as txn:
            for i in range(count):
                id, name = hashlib.sha256(b"%d" % i).digest()[:16], f"crawl {i:06}"
                made = Session(id.hex(), name, head, None, 0, float(i), float(i * 7919 % count))
                txn.put(id, encode_session(made), db=sessions)
                txn.put(name.encode(), id, db=names)


def _sessions(folder: Path, count: int, rounds: int) -> list[Figure]:
    """Lists and changes among so many sessions."""
    _fill_sessions(folder, count)
    start = time.perf_counter()
    with Ledger.open(folder) as ledger:
        first = (time.perf_counter() - start) * 1e3
        turn = [NewTurn("user", "y")]
        calls: dict[str, Callable[[], object]] = {
            "list_20": lambda: ledger.sessions(20),
            "list_20_by_prefix": lambda: ledger.sessions(20, prefix="crawl 0000"),
            "list_20_from_the_middle": lambda: ledger.sessions(20, count // 2),
            "list_all": ledger.sessions,
            "misspelt_name": lambda: _misspelt(ledger),
            "append": lambda: ledger.append("crawl 000007", turn),
        }
        ms = {"first_open": first}
        ms |= {name: _milliseconds(call, 3 if name == "list_all" else rounds) for name, call in calls.items()}
    bars = {"list_20": 2.0, "list_20_by_prefix": 2.0}
    return [
        Figure(metric=name, value=value, unit="ms", better="lower", bar=bars.get(name), baseline=_whole(name, ms))
        for name, value in ms.items()
    ]


def _whole(name: str, ms: dict[str, float]) -> float | None:
    """A list of a few, beside reading all sessions, as it was made before there was an order of them."""
    return ms["list_all"] if name == "list_20" else None


def run(options: Options) -> list[Figure]:
    """A million entries in contexts of 32 blocks, opened in processes of their own; a hundred thousand sessions."""
    blocks, sessions, rounds = options.pick(50_000, 1_000_000), options.pick(5_000, 100_000), options.pick(5, 15)
    with tempfile.TemporaryDirectory() as folder:
        options.step(f"making a store of {blocks:,} entries")
        fill_blocks(Path(folder), blocks)
        options.step("opening it")
        opened = [fresh(open_blocks, folder) for _ in range(options.pick(2, 5))]
    best = min(opened, key=lambda one: float(one["seconds"]))
    note = f"{int(best['blocks']):,} entries"
    figures = [
        Figure(
            metric="open", value=min(one["seconds"] for one in opened), unit="s", better="lower", bar=2.0, note=note
        ),
        Figure(metric="open_processor", value=best["processor"], unit="s", better="lower", note="of it on a processor"),
        Figure(
            metric="memory",
            value=statistics.median(one["memory"] for one in opened),
            unit="bytes/block",
            better="lower",
            bar=300 if blocks >= 1_000_000 else None,
            note="all memory of the process that opening took, mapped files apart",
        ),
    ]
    options.step(f"lists of {sessions:,} sessions")
    with tempfile.TemporaryDirectory() as folder:
        return figures + _sessions(Path(folder), sessions, rounds)
