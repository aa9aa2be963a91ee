"""The tables of the block cache in LMDB: what reads and writes their rows, without the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ctxreuse.block.format import Kind, parse
from ctxreuse.block.levels import EXACT, allowed_by
from ctxreuse.errors import FormatError
from ctxreuse.store.blocks.index import Plan
from ctxreuse.store.lmdb.env import Env
from ctxreuse.store.lmdb.records import Record
from ctxreuse.store.types import Progress
from ctxreuse.tree import Match

__all__ = ["TABLES", "corrupt", "counts", "givers", "lookup", "match_records", "records", "table_of", "write_plan"]

TABLES = ("blocks", "states", "meta", "info")
#: Before the key of a value that a peer gave, in table ``info``; its giver is the value. Programs that know nothing of
#: givers leave them alone, so one may be there without its value.
_GIVEN: dict[Kind, bytes] = {"block": b"given b ", "state": b"given s "}


def table_of(kind: Kind) -> str:
    """Return the table of a kind of value."""
    return "blocks" if kind == "block" else "states"


def records(env: Env) -> Iterator[tuple[bytes, Record]]:
    """Iterate over all keys and records of the newest commit, reading no value.

    Raises lmdb.Error, StoreError, or ValueError for a bad record.
    """
    with env.read() as txn, txn.cursor(db=env.tables["meta"]) as cursor:
        for key, raw in cursor:
            yield bytes(key), Record.unpack(raw)


def lookup(env: Env, keys: Sequence[bytes]) -> list[Record | None]:
    """Return the records of ``keys`` in the newest commit. Raises as `records`."""
    with env.read() as txn:
        table = env.tables["meta"]
        found = (txn.get(key, db=table) for key in keys)
        return [Record.unpack(raw) if raw is not None else None for raw in found]


def givers(env: Env) -> dict[bytes, bytes]:
    """Return who gave each block that a peer gave, or the state at its end. Raises lmdb.Error, StoreError."""
    found: dict[bytes, bytes] = {}
    with env.read() as txn, txn.cursor(db=env.tables["info"]) as cursor:
        for mark in sorted(_GIVEN.values(), reverse=True):  # the block's own giver last
            more = cursor.set_range(mark)
            while more and bytes(cursor.key()).startswith(mark):
                found[bytes(cursor.key())[len(mark) :]] = bytes(cursor.value())
                more = cursor.next()
    return found


def match_records(found: Sequence[Record | None], max_kl: float | None = None) -> Match:
    """Return the longest stored prefix, as `ContextTree.match`."""
    blocks = tokens = state_blocks = state_tokens = 0
    for record in found:
        if record is None or not allowed_by(record.level, max_kl):
            break
        blocks, tokens = blocks + 1, record.depth
        if record.state_nbytes and allowed_by(record.state_level, max_kl):
            state_blocks, state_tokens = blocks, tokens
    return Match(blocks, tokens, state_blocks, state_tokens)


def counts(env: Env) -> tuple[int, int, int]:
    """Return the number of blocks, of states, and the bytes of their pages."""
    with env.read() as txn:
        blocks, states = (txn.stat(env.tables[name]) for name in TABLES[:2])
    pages = blocks["overflow_pages"] + states["overflow_pages"]
    return blocks["entries"], states["entries"], pages * blocks["psize"]


def corrupt(env: Env, progress: Progress | None = None) -> list[tuple[bytes, str]]:
    """Return the keys whose block or state fails its checksums or has another key, and the error. Reads all values."""
    bad: list[tuple[bytes, str]] = []
    total, done = sum(counts(env)[:2]), 0
    kinds: tuple[Kind, ...] = ("block", "state")
    for kind in kinds:
        last: bytes | None = None
        while True:
            # A new transaction every 64 values: a long one would keep freed pages from being reused.
            with env.read() as txn, txn.cursor(db=env.tables[table_of(kind)]) as cursor:
                more = cursor.first() if last is None else cursor.set_range(last + b"\0")
                for _ in range(64):
                    if not more:
                        break
                    last = bytes(cursor.key())
                    try:
                        view = parse(cursor.value())
                        view.verify()
                        if view.header.key != last or view.header.kind != kind:
                            bad.append((last, f"{kind} of another key"))
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
    """Write a plan and delete ``doomed`` keys in one transaction. Raises lmdb.Error, StoreError."""

    def work(txn: Any) -> None:
        blocks, states, meta, info = (env.tables[name] for name in TABLES)  # another file may have come meanwhile
        for removed in plan.stripped:
            txn.delete(removed.key, db=states)
            txn.delete(_GIVEN["state"] + removed.key, db=info)
            record = Record.unpack(txn.get(removed.key, db=meta))
            txn.put(removed.key, record._replace(state_nbytes=0, state_level=EXACT).pack(), db=meta)
        for key in [*doomed, *(removed.key for removed in plan.evicted)]:
            for table in (blocks, states, meta):
                txn.delete(key, db=table)
            for mark in _GIVEN.values():
                txn.delete(mark + key, db=info)
        for put in plan.puts:
            txn.put(put.key, put.data, db=blocks if put.kind == "block" else states)
            given = _GIVEN[put.kind] + put.key
            if put.giver:
                txn.put(given, put.giver, db=info)
            else:
                txn.delete(given, db=info)
        for key, record in plan.records.items():
            txn.put(key, record.pack(), db=meta)

    env.write(work)
