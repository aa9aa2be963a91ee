"""Opening a ledger: never drop it, never touch what is missing of it, say what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import lmdb
import msgspec

from ctxreuse.errors import StoreError
from ctxreuse.store.env import Env, broken, explain, shortage

__all__ = ["TABLES", "open_ledger"]

TABLES = ("sessions", "names", "turns", "tokens", "info")
FORMAT = 1


def _damaged(home: Path, why: object) -> StoreError:
    fix = f"Nothing was changed: keep a copy of {home}, and restore it from a backup"
    return StoreError(f"the ledger is damaged: {why}", where=str(home), fix=fix)


def open_ledger(home: Path, map_size: int, whole_ledger: Callable[[Env], None], *, readonly: bool) -> Env:
    """The environment of a ledger. ``whole_ledger`` walks all of it, called if the file is shorter than it says.

    Raises StoreError for a ledger that is damaged or of another format, and leaves its bytes as they are.
    """
    short = shortage(home)
    whole = 0
    try:
        if not readonly:
            home.mkdir(exist_ok=True)
        if short:
            # Touching what is missing would kill the process. Zeros do for pages that were never written; if it was
            # truncated, the walk below finds out and the file gets its old length again.
            whole = (home / "data.mdb").stat().st_size
            if readonly:
                raise _damaged(home, f"{short} bytes are missing at its end")
            os.truncate(home / "data.mdb", whole + short)
        env = Env(home, TABLES, map_size=map_size, readonly=readonly, durable=True)
    except OSError as error:
        raise explain(lmdb.Error(str(error), error.errno or 0), home) from None
    except lmdb.Error as error:
        raise (_damaged(home, error) if broken(error) else explain(error, home)) from None
    try:
        _check_format(env, home)
        if short:
            whole_ledger(env)
        return env
    except (StoreError, lmdb.Error, AssertionError) as error:
        env.close()
        if whole:
            os.truncate(home / "data.mdb", whole)
        if broken(error) or short:
            raise _damaged(home, error) from None
        raise (error if isinstance(error, StoreError) else explain(error, home)) from None


def _check_format(env: Env, home: Path) -> None:
    with env.read() as txn:
        raw = txn.get(b"format", db=env.tables["info"])
    if raw is None and not env.readonly:
        env.write(lambda txn: txn.put(b"format", msgspec.msgpack.encode(FORMAT), db=env.tables["info"]))
    elif raw is not None and bytes(raw) != msgspec.msgpack.encode(FORMAT):
        fix = "Open it with the version of ctxreuse that wrote it, or update this one"
        raise StoreError(f"the ledger has another format than {FORMAT}", where=str(home), fix=fix)
