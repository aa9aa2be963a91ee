"""Opening the block cache: trust it, verify it, or start it empty, but never fail because of its content."""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path

import lmdb
import msgspec
import numpy as np

from ctxreuse.block.format import parse
from ctxreuse.block.levels import stricter
from ctxreuse.errors import StoreError
from ctxreuse.kernels.dispatch import native as _native
from ctxreuse.store.blocks.index import Index
from ctxreuse.store.blocks.tables import TABLES, corrupt, counts, records
from ctxreuse.store.lmdb.env import CACHE_MAP, Env, broken, explain, open_beside
from ctxreuse.store.lmdb.owner import attended
from ctxreuse.store.lmdb.records import FORMAT, READABLE, ROW, decode_tail
from ctxreuse.store.lmdb.recovery import Scan, extend, scan, shortage
from ctxreuse.store.types import Progress
from ctxreuse.tree import NodeKind

__all__ = ["compare", "open_cache", "open_readonly"]

log = logging.getLogger(__name__)

#: Bytes of a file whose keys and first pages of values are compared on each open: some thousand blocks.
_SMALL = 1 << 30


class _UnusableError(Exception):
    """The content of the cache cannot be used, and why."""


def open_cache(
    home: Path, map_size: int, index: Index, *, clean: bool, same_boot: bool, progress: Progress | None
) -> tuple[Env, str]:
    """Open ``home`` for writing and fill ``index``. Returns the environment and what had to be done.

    ``""``: it was closed cleanly. ``kept``: its process died, which LMDB survives. ``verified``: the machine went down
    before the last sync, so pages and checksums were compared. ``rebuilt``: it could not be used and starts empty.

    Args:
        home: its folder, created if need be.
        map_size: bytes of address space.
        index: an empty index.
        clean: whether the last owner closed it.
        same_boot: whether the machine has been up since.
        progress: called as values are verified.

    Raises:
        StoreError: an empty cache could not be opened here either.
    """
    present = (home / "data.mdb").exists()
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        short = shortage(home)
        suspect = present and (short > 0 or not (clean or same_boot))
        if short:
            extend(home / "data.mdb", short)
    except OSError as error:
        raise explain(lmdb.Error(str(error), error.errno or 0), home) from None
    try:
        env = _open(home, map_size, index, suspect, progress)
        return env, "verified" if suspect else "" if clean else "kept"
    except (_UnusableError, lmdb.Error, StoreError) as error:
        if not isinstance(error, _UnusableError) and not broken(error):
            raise (error if isinstance(error, StoreError) else explain(error, home)) from None
        log.warning("the cache at %s cannot be used and starts empty: %s", home, error)
    with contextlib.suppress(OSError):
        shutil.rmtree(home)
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        return _open(home, map_size, index, False, progress), "rebuilt"
    except (_UnusableError, lmdb.Error, OSError) as error:
        raise explain(error, home) from None


def _open(home: Path, map_size: int, index: Index, suspect: bool, progress: Progress | None) -> Env:
    # LMDB ends the process when an inner page is not what it expects, so the pages are walked first. After a clean
    # close of a large store the first pages of values are not read: of a million blocks that could take minutes.
    found, file = Scan("", bytearray(), []), home / "data.mdb"
    thorough = suspect or (file.exists() and file.stat().st_size <= _SMALL)
    if file.exists():
        found = scan(home, "meta", values=thorough)
    wrong = found.wrong
    if suspect and not wrong and shortage(home):
        wrong = "pages are missing at its end"
    if wrong:
        raise _UnusableError(wrong)
    env = Env(home, TABLES, map_size=map_size, readonly=False, durable=False)
    try:
        _check_format(env)
        bad = {key for key, _ in corrupt(env, progress)} if suspect else set()
        table = np.frombuffer(found.rows, ROW)
        blocks, states, _ = counts(env)
        if blocks != np.count_nonzero(table["nbytes"]) or states != np.count_nonzero(table["state_nbytes"]):
            raise _UnusableError("values and records differ")
        if thorough and not _same_keys(env, table):
            raise _UnusableError("values and records have different keys")
        try:
            kinds = [NodeKind(*decode_tail(tail)) for tail in found.tails]
        except ValueError as error:
            raise _UnusableError(str(error)) from None
        doomed = bad.union(index.load(found.rows, kinds, bad))
        del table, found
        _native.trim_memory()  # of a million blocks 15 MB
        if doomed:
            log.warning("the cache at %s has %d entries that cannot be used; they are dropped", home, len(doomed))
            env.write(lambda txn: [txn.delete(key, db=env.tables[name]) for key in doomed for name in TABLES[:3]])
        return env
    except BaseException:
        env.close()
        raise


def _same_keys(env: Env, table: np.ndarray) -> bool:
    with env.read() as txn:
        for name, column in (("blocks", "nbytes"), ("states", "state_nbytes")):
            with txn.cursor(db=env.tables[name]) as cursor:
                keys = b"".join(cursor.iternext(keys=True, values=False))
            if keys != np.sort(table["key"][table[column] > 0]).tobytes():
                return False
    return True


def _check_format(env: Env) -> None:
    current = msgspec.msgpack.encode(FORMAT)
    with env.read() as txn:
        raw = txn.get(b"format", db=env.tables["info"])
        raw = bytes(raw) if raw is not None else None
        empty = raw is None and not txn.stat(env.tables["meta"])["entries"]
    if not empty and raw not in [msgspec.msgpack.encode(known) for known in READABLE]:
        raise _UnusableError(f"its tables have another format than {FORMAT}")
    if raw != current:
        env.write(lambda txn: txn.put(b"format", current, db=env.tables["info"]))


def open_readonly(home: Path, map_size: int = CACHE_MAP) -> Env:
    """Open an existing cache for reading. Raises StoreError if there is none or it cannot be read."""
    if not (home / "data.mdb").exists():
        raise StoreError("there are no blocks here", where=str(home), fix="Open it for writing once to create it")
    # Beside a living owner a few pages may be missing that are never read; a dead one may have left a cut file.
    if shortage(home) and not attended(home.parent):
        fix = "Open it for writing once: what is damaged is dropped"
        raise StoreError("the file of the cache is too short", where=str(home), fix=fix)
    try:
        return open_beside(home, TABLES, map_size=map_size)
    except lmdb.Error as error:
        raise explain(error, home) from None
    except OSError as error:
        raise explain(lmdb.Error(str(error), error.errno or 0), home) from None


def compare(index: Index, env: Env, doomed: set[bytes]) -> None:
    """Raise AssertionError where ``index`` and disk differ; keys in ``doomed`` are about to be deleted."""
    tree, seen = index.tree, 0
    for key, record in records(env):
        if key not in doomed:
            node = tree.get(key)
            assert node is not None, f"{key.hex()[:12]} is on disk and not in the tree"
            # A permission that was narrowed reaches the disk with the next renewal.
            noted = index.record(node, record.used)
            assert noted._replace(max_kl=record.max_kl) == record, f"the record of {node!r} differs"
            assert noted.max_kl in (record.max_kl, stricter(noted.max_kl, record.max_kl)), (
                f"{node!r} may be kept at a worse level than its record says"
            )
            seen += 1
    assert seen == len(tree), f"{len(tree)} nodes in the tree, {seen} on disk"
    with env.read() as txn:
        for name, count in (("blocks", sum(1 for node in tree if node.nbytes)), ("states", tree.states)):
            keys = {bytes(key) for key in txn.cursor(db=env.tables[name]).iternext(values=False)}
            assert len(keys - doomed) == count, f"{len(keys)} {name} on disk, {count} in the tree"
            for key in keys - doomed:
                written = parse(txn.get(key, db=env.tables[name])).header.level
                node = tree.get(key)
                assert node is not None, f"{key.hex()[:12]} is on disk and not in the tree"
                level = node.level if name == "blocks" else node.state_level
                assert written == level, f"the level of {node!r} is {written} on disk and {level} in the tree"
