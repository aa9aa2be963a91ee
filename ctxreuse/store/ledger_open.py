"""Opening a ledger: never drop it, never touch what is missing of it, say what is wrong."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import lmdb
import msgspec

from ctxreuse.errors import SessionError, StoreError
from ctxreuse.store.env import Env, broken, explain, open_beside, shortage
from ctxreuse.store.owner import attended
from ctxreuse.store.recovery import extend

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
    try:
        if not readonly:
            home.mkdir(exist_ok=True)
        short = shortage(home)
        if short and not (readonly and attended(home.parent)):
            _walk_copy(home, short, whole_ledger)
            if not readonly:
                extend(home / "data.mdb", short)
        if readonly:
            env = open_beside(home, TABLES, map_size=map_size)
        else:
            env = Env(home, TABLES, map_size=map_size, readonly=False, durable=True)
    except OSError as error:
        raise explain(lmdb.Error(str(error), error.errno or 0), home) from None
    except lmdb.Error as error:
        raise (_damaged(home, error) if broken(error) else explain(error, home)) from None
    try:
        _check_format(env, home)
        return env
    except (StoreError, lmdb.Error) as error:
        env.close()
        if broken(error):
            raise _damaged(home, error) from None
        raise (error if isinstance(error, StoreError) else explain(error, home)) from None


def _walk_copy(home: Path, short: int, whole_ledger: Callable[[Env], None]) -> None:
    """Prove that nothing of value is missing at the end, on a copy: trying it on the ledger itself would change it."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copyfile(home / "data.mdb", Path(scratch) / "data.mdb")
        extend(Path(scratch) / "data.mdb", short)
        try:
            wrong = f"{short} bytes are missing at its end" if shortage(Path(scratch)) else ""
            if not wrong:
                env = Env(Path(scratch), TABLES, map_size=1 << 30, readonly=True, durable=False)
                try:
                    whole_ledger(env)
                finally:
                    env.close()
        except (StoreError, SessionError, lmdb.Error, AssertionError) as error:
            wrong = f"{short} bytes are missing at its end: {error}"
    if wrong:
        raise _damaged(home, wrong)


def _check_format(env: Env, home: Path) -> None:
    with env.read() as txn:
        raw = txn.get(b"format", db=env.tables["info"])
    if raw is None and not env.readonly:
        env.write(lambda txn: txn.put(b"format", msgspec.msgpack.encode(FORMAT), db=env.tables["info"]))
    elif raw is not None and bytes(raw) != msgspec.msgpack.encode(FORMAT):
        fix = "Open it with the version of ctxreuse that wrote it, or update this one"
        raise StoreError(f"the ledger has another format than {FORMAT}", where=str(home), fix=fix)
