"""Opening the cache: trust it, verify it, or start it afresh, but never fail because of what is in it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import msgspec

from ctxreuse.block import parse
from ctxreuse.errors import FormatError, StoreError
from ctxreuse.levels import EXACT, worst
from ctxreuse.store.base import Progress
from ctxreuse.store.env import Env, broken, explain, shortage
from ctxreuse.store.index import Index, Plan
from ctxreuse.store.records import FORMAT, READABLE, Record

__all__ = ["TABLES", "compare", "corrupt", "extend", "open_cache", "records", "sound", "write_plan"]

log = logging.getLogger(__name__)

_EXTEND = 64 << 20

TABLES = ("blocks", "states", "meta", "info")


class Unusable(Exception):
    """The cache's content cannot be used; says why."""


def extend(file: Path, short: int) -> None:
    """Put zeros where pages are missing at the end, because touching nothing at all there would kill the process.

    Pages that were given back in the transaction that got them are never written, so a sound file may lack a few; a
    file that lacks more is left to the walk that follows.
    """
    if short <= _EXTEND:
        os.truncate(file, file.stat().st_size + short)


def records(env: Env) -> Iterator[tuple[bytes, Record]]:
    """All keys with their records. Touches no value. Raises Unusable where the table is not ours."""
    with env.read() as txn, txn.cursor(db=env.tables["meta"]) as cursor:
        for key, raw in cursor:
            try:
                yield bytes(key), Record.unpack(raw)
            except ValueError as error:
                raise Unusable(str(error)) from None


def corrupt(env: Env, progress: Progress | None = None) -> list[tuple[bytes, str]]:
    """Keys whose block or state fails its checksums or is not that key's, with what is wrong. Reads everything."""
    bad: list[tuple[bytes, str]] = []
    with env.read() as txn:
        total = sum(txn.stat(env.tables[table])["entries"] for table in ("blocks", "states"))
    done = 0
    for table, kind in (("blocks", "block"), ("states", "state")):
        last: bytes | None = None
        while True:
            # A fresh transaction every 64 values: a long one would keep freed pages from being used again.
            with env.read() as txn, txn.cursor(db=env.tables[table]) as cursor:
                more = cursor.first() if last is None else cursor.set_range(last + b"\0")
                for _ in range(64):
                    if not more:
                        break
                    last = bytes(cursor.key())
                    try:
                        view = parse(cursor.value())
                        view.verify()
                        if view.header.key != last or view.header.kind != kind:
                            bad.append((last, f"{table[:-1]} of another key"))
                    except FormatError as error:
                        bad.append((last, str(error)))
                    done += 1
                    more = cursor.next()
            if progress is not None:
                progress(done, max(done, total))
            if not more:
                break
    return bad


def write_plan(env: Env, plan: Plan, doomed: Sequence[bytes]) -> None:
    """All of a plan in one transaction, and the deletion of ``doomed`` keys. Raises lmdb.Error, StoreError."""
    blocks, states, meta = (env.tables[name] for name in TABLES[:3])

    def work(txn: Any) -> None:
        for gone in plan.stripped:
            txn.delete(gone.key, db=states)
            held = Record.unpack(txn.get(gone.key, db=meta))
            txn.put(gone.key, held._replace(state_nbytes=0, state_level=EXACT).pack(), db=meta)
        for key in [*doomed, *(gone.key for gone in plan.evicted)]:
            for table in (blocks, states, meta):
                txn.delete(key, db=table)
        for put in plan.puts:
            txn.put(put.key, put.data, db=blocks if put.kind == "block" else states)
        for key, record in plan.records.items():
            txn.put(key, record.pack(), db=meta)

    env.write(work)


def compare(index: Index, env: Env, doomed: set[bytes]) -> None:
    """Raises AssertionError where ``index`` and the disk hold different entries; ``doomed`` are about to be deleted."""
    tree, seen = index.tree, 0
    for key, record in records(env):
        if key not in doomed:
            node = tree.get(key)
            assert node is not None, f"{key.hex()[:12]} is on disk and not in the tree"
            # A permission that was narrowed reaches the disk with the next renewal.
            noted = index.record(node, record.used)
            assert noted._replace(lossy=record.lossy) == record, f"the record of {node!r} differs"
            assert noted.lossy in (record.lossy, worst(noted.lossy or None, record.lossy or None) or ""), (
                f"{node!r} may be kept at a worse level than its record says"
            )
            seen += 1
    assert seen == len(tree), f"{len(tree)} nodes in the tree, {seen} on disk"
    with env.read() as txn:
        for name, count in (("blocks", sum(1 for node in tree if node.nbytes)), ("states", index.states)):
            keys = {bytes(key) for key in txn.cursor(db=env.tables[name]).iternext(values=False)}
            assert len(keys - doomed) == count, f"{len(keys)} {name} on disk, {count} in the tree"
            for key in keys - doomed:
                said = parse(txn.get(key, db=env.tables[name])).header.level
                held = tree.get(key)
                assert held is not None, f"{key.hex()[:12]} is on disk and not in the tree"
                level = held.level if name == "blocks" else held.state_level
                assert said == level, f"the level of {held!r} is {said} on disk and {level} in the tree"


def sound(home: Path) -> str:
    """Walk the file's pages without LMDB, which trusts what it reads: ``""`` or the first thing that is wrong.

    A py-lmdb without that walker (before 3.0) cannot vouch for the file: then the answer is that.
    """
    try:
        from lmdb.verify import VerifyError, verify
    except ImportError:
        return "this version of lmdb cannot verify it"
    try:
        found = verify(str(home))
    except (VerifyError, OSError, ValueError, IndexError, OverflowError) as error:
        return str(error) or type(error).__name__
    return str(found[0]) if found else ""


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Loading makes hundreds of thousands of objects and no garbage; looking for it doubled the time to open."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _open(home: Path, map_size: int, index: Index, suspect: bool, progress: Progress | None) -> Env:
    # LMDB ends the process when an inner page is not what it expects, so the pages are walked before it sees them:
    # 9 µs a block, whatever its size.
    wrong = sound(home) if (home / "data.mdb").exists() else ""
    if suspect and not wrong and shortage(home):
        wrong = "pages are missing at its end"
    if wrong:
        raise Unusable(wrong)
    env = Env(home, TABLES, map_size=map_size, readonly=False, durable=False)
    try:
        _check_format(env)
        bad = {key for key, _ in corrupt(env, progress)} if suspect else set()
        with _no_collector():
            entries = list(records(env))
        with env.read() as txn:
            counts = [txn.stat(env.tables[name])["entries"] for name in ("blocks", "states")]
        if counts != [sum(bool(r.nbytes) for _, r in entries), sum(bool(r.state_nbytes) for _, r in entries)]:
            raise Unusable("values and records differ")
        with _no_collector():
            doomed = bad.union(index.load([entry for entry in entries if entry[0] not in bad] if bad else entries))
        if doomed:
            log.warning("the cache at %s held %d entries that cannot be used; they are dropped", home, len(doomed))
            env.write(lambda txn: [txn.delete(key, db=env.tables[name]) for key in doomed for name in TABLES[:3]])
        return env
    except BaseException:
        env.close()
        raise


def _check_format(env: Env) -> None:
    with env.read() as txn:
        raw = txn.get(b"format", db=env.tables["info"])
        empty = raw is None and not txn.stat(env.tables["meta"])["entries"]
    if empty:
        env.write(lambda txn: txn.put(b"format", msgspec.msgpack.encode(FORMAT), db=env.tables["info"]))
    elif raw is None or bytes(raw) not in [msgspec.msgpack.encode(known) for known in READABLE]:
        raise Unusable(f"its tables have another format than {FORMAT}")
    elif bytes(raw) != msgspec.msgpack.encode(FORMAT):
        env.write(lambda txn: txn.put(b"format", msgspec.msgpack.encode(FORMAT), db=env.tables["info"]))


def open_cache(
    home: Path, map_size: int, index: Index, *, clean: bool, same_boot: bool, progress: Progress | None
) -> tuple[Env, str]:
    """Open ``home`` for writing and fill ``index``; returns the environment and what had to be done.

    ``""``: closed cleanly. ``kept``: its process died, which LMDB survives. ``verified``: the machine went down before
    the last sync, so pages and checksums were compared. ``rebuilt``: it could not be used and starts empty.
    Raises StoreError only where an empty cache could not be opened either.
    """
    present = (home / "data.mdb").exists()
    try:
        home.mkdir(exist_ok=True)
        short = shortage(home)
        suspect = present and (short > 0 or not (clean or same_boot))
        if short:
            extend(home / "data.mdb", short)
    except OSError as error:
        raise explain(lmdb.Error(str(error), error.errno or 0), home) from None
    try:
        env = _open(home, map_size, index, suspect, progress)
        return env, "verified" if suspect else "" if clean else "kept"
    except (Unusable, lmdb.Error, StoreError) as error:
        if not isinstance(error, Unusable) and not broken(error):
            raise (error if isinstance(error, StoreError) else explain(error, home)) from None
        log.warning("the cache at %s cannot be used and starts empty: %s", home, error)
    with contextlib.suppress(OSError):
        shutil.rmtree(home)
    try:
        home.mkdir(exist_ok=True)
        return _open(home, map_size, index, False, progress), "rebuilt"
    except (Unusable, lmdb.Error, OSError) as error:
        raise explain(error, home) from None
