"""Deletions brought to their end: what a crash left undone is done, and files are rewritten without what is gone."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from ctxreuse.config import StoreConfig
from ctxreuse.runtime.erase import Erasure, erase_stored
from ctxreuse.store import Ledger, Progress, TieredStore, open_store
from ctxreuse.why import FILE, RequestLog

__all__ = ["Compacted", "Migrated", "compact", "compact_folder", "finish_deletions", "migrate_folder"]

log = logging.getLogger(__name__)


class Compacted(msgspec.Struct, frozen=True):
    """The result of `compact_folder`: turns removed that no session reaches, bytes of the files before and after, and
    files beside the store's that may still hold what was deleted."""

    turns: int
    bytes_before: int
    bytes_after: int
    kept: tuple[str, ...] = ()


def finish_deletions(ledger: Ledger, carry_out: Callable[[Erasure], int]) -> tuple[int, int]:
    """Carry out the deletions that are noted in a ledger; returns how many requests and blocks they were."""
    requests = blocks = 0
    for number, note in ledger.deletions().items():
        try:
            plan = msgspec.msgpack.decode(note, type=Erasure)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("the note of a deletion cannot be read: %s", error)
            plan = Erasure()
        blocks += carry_out(plan)
        requests += len(plan.requests)
        ledger.deletion_done(number)
    return requests, blocks


def compact(ledger: Ledger, store: TieredStore, progress: Progress | None = None) -> int:
    """Rewrite cache and ledger; returns the number of turns removed. Raises StoreError.

    The ledger is the last, as it says that there is something to do.
    """
    if store.disk is not None:
        store.disk.compact(progress)
    turns = ledger.compact(progress)
    for file in sorted(ledger.path.glob("*.journal*.bad")):  # set aside when damaged; explanations only
        with contextlib.suppress(OSError):
            file.unlink()
    return turns


def compact_folder(config: StoreConfig, progress: Progress | None = None) -> Compacted:
    """Finish deletions and rewrite the files of a store that no process has open. Raises StoreError."""
    place = config.folder()
    before = _size(place)
    if not (place / "ledger" / "data.mdb").exists():  # a cloud's, which has no texts
        with open_store(config, progress=progress) as store:
            if store.disk is not None:
                store.disk.compact(progress)
        return Compacted(0, before, _size(place))
    with Ledger.open(place) as ledger, open_store(config, progress=progress) as store:
        requests = RequestLog(place / FILE).open()
        try:
            finish_deletions(ledger, lambda plan: erase_stored(plan, store, requests))
        finally:
            requests.close()
        turns = compact(ledger, store, progress)
    return Compacted(turns, before, _size(place), _kept(place))


class Migrated(msgspec.Struct, frozen=True):
    """The result of `migrate_folder`: turns of an earlier version that were rewritten, entries of the cache that this
    version cannot read and dropped, and bytes of the files before and after."""

    turns: int
    dropped: int
    bytes_before: int
    bytes_after: int


def migrate_folder(config: StoreConfig, progress: Progress | None = None) -> Migrated:
    """Rewrite a store of an earlier version, which nothing has open, as this version does. Raises StoreError."""
    place = config.folder()
    before = _size(place)
    with Ledger.open(place) as ledger, open_store(config, progress=progress) as store:
        turns = ledger.migrate()
        disk = store.disk
        bad = disk.verify(progress) if disk is not None else []
        for key, _ in bad:
            store.drop(key, "corrupt")
        compact(ledger, store, progress)
    return Migrated(turns, len(bad), before, _size(place))


def _kept(place: Path) -> tuple[str, ...]:
    return tuple(str(file) for file in sorted((place / "ledger").glob("data.mdb.*")))


def _size(place: Path) -> int:
    return sum(os.stat(file).st_size for file in place.glob("*/data.mdb"))
