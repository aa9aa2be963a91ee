"""Opening a ledger: its pages are walked before LMDB trusts them, and a damaged one is an error and stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import msgspec

from ctxreuse.errors import StoreDamagedError, StoreError
from ctxreuse.store.ledger.items import TABLE as ITEMS
from ctxreuse.store.ledger.recent import TABLE as RECENT
from ctxreuse.store.ledger.records import FORMAT, READABLE, decode_id, encode_id
from ctxreuse.store.lmdb.env import Env, broken, explain, open_beside
from ctxreuse.store.lmdb.recovery import examine, extend, shortage, sound, tables_in

__all__ = ["TABLES", "NotBegunError", "checked_from", "damaged", "open_env"]

TABLES = ("sessions", "names", "turns", "tokens", "info")
#: That programs before them did not write.
_OPTIONAL = (RECENT, ITEMS)


class NotBegunError(StoreError):
    """There is no ledger, or the process that created it ended before anything was in it."""


def open_env(home: Path, map_size: int, *, readonly: bool, trusted: bool, stamp: str) -> Env:
    """Open a ledger's environment.

    Args:
        home: its folder, created if need be.
        map_size: bytes of address space.
        readonly: open beside the process that writes.
        trusted: whether its last owner, or the one beside, answers for its pages; else they are walked.
        stamp: of its file when it was last closed, ``""`` if it never was.

    Raises:
        NotBegunError: there is nothing to read.
        StoreDamagedError: it is damaged.
        StoreError: it has another format, or cannot be opened.
    """
    try:
        if not readonly:
            home.mkdir(mode=0o700, exist_ok=True)
        _check_pages(home, readonly=readonly, trusted=trusted, stamp=stamp)
        if readonly:
            env = open_beside(home, TABLES, map_size=map_size, optional=_OPTIONAL)
        else:
            env = Env(home, TABLES, map_size=map_size, readonly=False, durable=True, optional=_OPTIONAL)
    except OSError as error:
        raise explain(lmdb.Error(str(error), error.errno or 0), home) from None
    except lmdb.Error as error:
        raise (damaged(home, error) if broken(error) else explain(error, home)) from None
    try:
        _check_format(env, home)
        return env
    except (StoreError, lmdb.Error) as error:
        env.close()
        if broken(error):
            raise damaged(home, error) from None
        raise (error if isinstance(error, StoreError) else explain(error, home)) from None


def _check_pages(home: Path, *, readonly: bool, trusted: bool, stamp: str) -> None:
    file = home / "data.mdb"
    size = file.stat().st_size if file.exists() else 0
    if not size:
        if file.exists() and stamp:
            raise damaged(home, f"its file is empty, and had {stamp.partition(':')[0]} bytes when it was last closed")
        if readonly:
            raise _not_begun(home)
        return
    short = shortage(home)
    if short or not trusted:
        wrong = examine(home) if readonly else sound(home)
        if wrong:
            raise damaged(home, wrong)
    if readonly:
        if tables_in(home) < len(TABLES):
            raise _not_begun(home)
    elif short:
        extend(file, short)
        if shortage(home):
            raise damaged(home, f"{short} bytes are missing at its end")


def _not_begun(home: Path) -> NotBegunError:
    fix = "Open it for writing once to create it"
    return NotBegunError("there is no ledger here, or nothing was in it yet", where=str(home), fix=fix)


def damaged(home: Path, why: object) -> StoreDamagedError:
    """Return the error for a damaged ledger."""
    fix = (
        "Nothing was changed. Keep a copy of that folder, then bring back a backup with `ctxreuse store restore`, "
        "or save what can be read with `ctxreuse store rescue`"
    )
    return StoreDamagedError(f"the ledger is damaged: {why}", where=str(home), fix=fix)


def _check_format(env: Env, home: Path) -> None:
    current = msgspec.msgpack.encode(FORMAT)
    info = env.tables["info"]
    with env.read() as txn:
        raw = txn.get(b"format", db=info)
        raw = bytes(raw) if raw is not None else None
        empty = not txn.stat(env.tables["turns"])["entries"] and not txn.stat(env.tables["sessions"])["entries"]
    if raw is None and not empty:
        raise damaged(home, "its format is not in it")
    if raw is None and env.readonly:
        raise _not_begun(home)
    if raw is not None and raw not in [msgspec.msgpack.encode(known) for known in READABLE]:
        fix = "Open it with the version of ctxreuse that wrote it, or update this one"
        raise StoreError(f"the ledger has another format than {FORMAT}", where=str(home), fix=fix)
    if raw != current and not env.readonly:

        def begin(txn: Any) -> None:
            top = txn.get(b"next", db=info)
            txn.put(b"checked", encode_id(b"checked", decode_id(b"next", top) if top is not None else 1), db=info)
            txn.put(b"format", current, db=info)

        env.write(begin)


def checked_from(env: Env) -> int:
    """Return the first turn that was written when every record had a checksum."""
    with env.read() as txn:
        raw = txn.get(b"checked", db=env.tables["info"])
        return decode_id(b"checked", raw) if raw is not None else 1 << 64
