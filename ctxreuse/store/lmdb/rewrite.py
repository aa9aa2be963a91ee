"""An environment rewritten: what was deleted is in no page of the new file, and the old file is gone.

LMDB never overwrites what it frees, neither pages nor bytes inside of them. Its own compacting copy leaves them out
too, but takes three times as long here, and cannot leave rows out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lmdb

from ctxreuse.errors import StoreFullError
from ctxreuse.kernels.dispatch import native as _native
from ctxreuse.store.lmdb.env import Env, explain, mapped_lists
from ctxreuse.store.types import Progress

__all__ = ["rewrite"]

#: Bytes of values in one transaction of the copy, which holds them in memory.
_BATCH = 32 << 20


def rewrite(
    env: Env, *, without: Mapping[tuple[str, bytes], bytes] | None = None, progress: Progress | None = None
) -> None:
    """Copy all rows of ``env`` into a new file that takes the place of its file in one step.

    This process goes on reading meanwhile, and its writes wait. A process that reads beside it opens the new file with
    its next read.

    Args:
        env: an environment that this process writes.
        without: rows to leave out, by table and key, where they still have this value.
        progress: called with the rows copied and all rows.

    Raises:
        StoreFullError: the disk has no room for both files; nothing was changed.
        StoreError: reads stay open, or LMDB fails; nothing was changed.
    """
    fresh = env.fresh
    with env.writing():
        _remove(fresh)
        try:
            room, need = shutil.disk_usage(env.path).free, _used_bytes(env)
            if room < need:
                fix = f"Make room on that disk: {need / 1e6:.0f} MB are needed and {room / 1e6:.0f} MB are free"
                raise StoreFullError("there is no room to rewrite the file", where=str(env.path), fix=fix)
            fresh.mkdir(mode=0o700)
            _copy(env, fresh, without or {}, progress)
            env.replace(fresh / "data.mdb")
        except lmdb.Error as error:
            raise explain(error, env.path) from None
        except OSError as error:
            raise explain(lmdb.Error(str(error), error.errno or 0), env.path) from None
        finally:
            _remove(fresh)
            _native.trim_memory()  # LMDB kept the pages of the copy in memory until they were written: 1.5 to 4 MB


def _remove(fresh: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(fresh)


def _used_bytes(env: Env) -> int:
    with env.read() as txn:
        stats = [txn.stat(table) for table in env.tables.values()]
    return sum(one["psize"] * (one["branch_pages"] + one["leaf_pages"] + one["overflow_pages"]) for one in stats)


def _copy(env: Env, fresh: Path, without: Mapping[tuple[str, bytes], bytes], progress: Progress | None) -> None:
    with env.read() as txn:
        tables = env.all_tables(txn)
        total = sum(int(txn.stat(table)["entries"]) for table in tables.values())
        with mapped_lists():
            out = lmdb.open(
                str(fresh), map_size=env.map_size, max_dbs=len(tables) + 1, sync=False, metasync=False, mode=0o600
            )
        try:
            done = 0
            for name, table in tables.items():
                into = out.open_db(name.encode())
                with txn.cursor(db=table) as cursor:
                    rows = ((key, value) for key, value in cursor if without.get((name, bytes(key))) != value)
                    for batch in _batches(rows):
                        with out.begin(write=True) as more, more.cursor(db=into) as end:
                            end.putmulti(batch, append=True)
                        done += len(batch)
                        if progress is not None:
                            progress(done, max(done, total))
            out.sync(True)
        finally:
            out.close()
    os.chmod(fresh / "data.mdb", 0o600)


def _batches(rows: Iterator[tuple[Any, Any]]) -> Iterator[list[tuple[Any, Any]]]:
    batch: list[tuple[Any, Any]] = []
    size = 0
    for key, value in rows:
        batch.append((key, value))
        size += len(key) + len(value)
        if size >= _BATCH or len(batch) >= 1 << 14:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
