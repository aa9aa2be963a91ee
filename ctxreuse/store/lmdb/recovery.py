"""Checks of an LMDB file before LMDB itself trusts it."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import lmdb
from lmdb.verify import VerifyError, verify

from ctxreuse.kernels.dispatch import native as _native
from ctxreuse.store.lmdb import apart
from ctxreuse.store.lmdb.owner import attended
from ctxreuse.store.types import Progress

__all__ = [
    "Meta",
    "Scan",
    "examine",
    "extend",
    "metas",
    "scan",
    "shortage",
    "sound",
    "stamp",
    "tables_in",
    "walk_snapshot",
]

_EXTEND = 64 << 20
# LMDB 0.9 data format 1: page header (16), magic, version, address, map size, two table records of 48, last page, txn.
_META = struct.Struct("<16xIIQQ48s48sQQ")
_META_MAGIC = 0xBEEFC0DE
_TABLE = struct.Struct("<IHHQQQQQ")


class Meta(NamedTuple):
    """What one of the two meta pages says: page size, roots of the free list and of the table of tables (None: empty),
    entries of the latter, last page, transaction."""

    page_size: int
    free: int | None
    main: int | None
    entries: int
    last: int
    txn: int


def metas(home: Path) -> list[Meta]:
    """Return the meta pages of ``home/data.mdb`` that can be read, the newest first."""
    try:
        with open(home / "data.mdb", "rb") as file:
            head = file.read(1 << 17)
    except OSError:
        return []
    found: list[Meta] = []
    for at in (0, *(1 << bits for bits in range(12, 17))):
        if len(head) < at + _META.size:
            continue
        magic, version, _, _, free, main, last, txn = _META.unpack_from(head, at)
        size, *_, free_root = _TABLE.unpack(free)
        *_, entries, main_root = _TABLE.unpack(main)
        if (magic, version) == (_META_MAGIC, 1) and 256 <= size <= 1 << 16 and at in (0, size):
            found.append(Meta(size, _root(free_root), _root(main_root), entries, last, txn))
    return sorted(found, key=lambda meta: meta.txn, reverse=True)


def _root(page: int) -> int | None:
    return None if page == (1 << 64) - 1 else page


def shortage(home: Path) -> int:
    """Return the bytes by which ``home/data.mdb`` is shorter than its newest meta page says; touching them is a SIGBUS.

    0 for a whole file, a missing one, or one whose meta pages cannot be read (LMDB itself refuses that).
    """
    for meta in metas(home)[:1]:
        return max(0, (meta.last + 1) * meta.page_size - (home / "data.mdb").stat().st_size)
    return 0


def tables_in(home: Path) -> int:
    """Return the number of tables in ``home/data.mdb``; 0 for a file that was not begun."""
    for meta in metas(home)[:1]:
        return meta.entries
    return 0


def stamp(home: Path) -> str:
    """Return what tells whether ``home/data.mdb`` was written since: size, time and inode; ``""`` without one."""
    try:
        found = os.stat(home / "data.mdb")
    except OSError:
        return ""
    return f"{found.st_size}:{found.st_mtime_ns}:{found.st_ino}"


def extend(file: Path, short: int) -> None:
    """Append zeros for ``short`` missing bytes, because touching pages that are not there kills the process.

    Pages that were freed in the transaction that allocated them are never written, so a sound file may be some pages
    short; a file that is short of more than 64 MiB is left as it is, to be refused.
    """
    if short <= _EXTEND:
        os.truncate(file, file.stat().st_size + short)


class Scan(NamedTuple):
    """What walking a file found: the first error or ``""``, and the rows of one table, see `records.ROW`.

    The kind of a row is an index of ``tails``: what stands behind the fixed part of its record.
    """

    wrong: str
    rows: bytearray
    tails: list[bytes]


def scan(home: Path, table: str | None = None, *, values: bool = True) -> Scan:
    """Walk the pages of ``home/data.mdb`` without LMDB, which trusts what it reads; about .4 µs a row.

    Args:
        home: the folder of an environment that no one writes.
        table: the table of records whose rows are wanted.
        values: look at the first page of each large value too, which may be a read from the disk each.
    """
    try:
        return Scan(*_native.lmdb_scan(str(home / "data.mdb"), values, table))
    except OSError as error:
        return Scan(str(error), bytearray(), [])


def sound(home: Path) -> str:
    """Walk all pages of ``home/data.mdb`` without LMDB: ``""`` or the first error found, .5 ms a megabyte."""
    wrong = scan(home).wrong
    return wrong and (_with_table(home) or wrong)


def _with_table(home: Path) -> str:
    """Return the first error of py-lmdb's own walker, which is slow and names the table; ``""`` if it finds none."""
    try:
        return next(iter(verify(str(home))), "")
    except (VerifyError, OSError, ValueError, IndexError, OverflowError, struct.error):
        return ""


def examine(home: Path) -> str:
    """`sound`, also beside a process that writes and may use pages again while they are walked. Raises StoreError."""
    wrong = sound(home)
    if wrong and attended(home.parent):
        wrong = apart.call(f"{__name__}:walk_snapshot", str(home), where=home)
    return wrong


def walk_snapshot(home: str, *, progress: Progress) -> str:
    """`sound` while a read transaction keeps the pages of the newest commit from being used again. See `apart.call`."""
    try:
        with lmdb.open(home, readonly=True, max_dbs=1, create=False) as env, env.begin():
            return sound(Path(home))
    except lmdb.Error as error:
        return str(error)
