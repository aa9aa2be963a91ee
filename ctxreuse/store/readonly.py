"""Reading beside the process that writes: its records on disk take the place of the tree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lmdb

from ctxreuse.errors import StoreError
from ctxreuse.levels import fits
from ctxreuse.store.env import CACHE_MAP, Env, explain, open_beside, shortage
from ctxreuse.store.owner import attended
from ctxreuse.store.records import Record
from ctxreuse.store.recovery import TABLES
from ctxreuse.tree import Match

__all__ = ["counts", "listed", "lookup", "match_disk", "open_readonly"]


def open_readonly(home: Path, map_size: int = CACHE_MAP) -> Env:
    """Open an existing environment for reading. Raises StoreError if there is none or it cannot be read."""
    if not (home / "data.mdb").exists():
        raise StoreError("there are no blocks here", where=str(home), fix="Open it for writing once to create it")
    # Beside a living owner a few pages may be missing that nobody will touch; a dead one may have left a cut file.
    if shortage(home) and not attended(home.parent):
        fix = "Open it for writing once: what is damaged is dropped"
        raise StoreError("the file of the cache is too short", where=str(home), fix=fix)
    try:
        return open_beside(home, TABLES, map_size=map_size)
    except lmdb.Error as error:
        raise explain(error, home) from None
    except OSError as error:
        raise explain(lmdb.Error(str(error), error.errno or 0), home) from None


def lookup(env: Env, keys: Sequence[bytes]) -> list[Record | None]:
    """The records of ``keys`` in the newest commit. Raises lmdb.Error, StoreError, or ValueError for a bad record."""
    with env.read() as txn:
        table = env.tables["meta"]
        found = (txn.get(key, db=table) for key in keys)
        return [Record.unpack(raw) if raw is not None else None for raw in found]


def listed(env: Env) -> list[tuple[bytes, Record]]:
    """All keys and records of the newest commit. Raises lmdb.Error, StoreError, or ValueError for a bad record."""
    with env.read() as txn, txn.cursor(db=env.tables["meta"]) as cursor:
        return [(bytes(key), Record.unpack(raw)) for key, raw in cursor]


def match_disk(found: Sequence[Record | None], lossy: str | None = None) -> Match:
    """The longest held prefix, as ``ContextTree.match`` gives it."""
    blocks = tokens = state_blocks = state_tokens = 0
    for record in found:
        if record is None or not fits(record.level, lossy):
            break
        blocks, tokens = blocks + 1, record.depth
        if record.state_nbytes and fits(record.state_level, lossy):
            state_blocks, state_tokens = blocks, tokens
    return Match(blocks, tokens, state_blocks, state_tokens)


def counts(env: Env) -> tuple[int, int, int]:
    """Blocks, states and the bytes of their pages."""
    with env.read() as txn:
        blocks, states = (txn.stat(env.tables[name]) for name in TABLES[:2])
    pages = blocks["overflow_pages"] + states["overflow_pages"]
    return blocks["entries"], states["entries"], pages * blocks["psize"]
