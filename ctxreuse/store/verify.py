"""Looking after a store from outside: compare everything with its checksums, give space back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import lmdb
import msgspec

from ctxreuse.errors import CtxReuseError, StoreError
from ctxreuse.store.base import Progress
from ctxreuse.store.blocks import BlockStore
from ctxreuse.store.env import Env
from ctxreuse.store.ledger import Ledger
from ctxreuse.store.owner import folder
from ctxreuse.store.readonly import open_readonly
from ctxreuse.store.records import Record
from ctxreuse.store.recovery import corrupt

__all__ = ["Collected", "Verdict", "gc", "verify"]


class Verdict(msgspec.Struct, frozen=True):
    """What ``verify`` found: counts of entries, and what is wrong, if anything. ``bad``: keys of cached values."""

    blocks: int
    states: int
    sessions: int
    turns: int
    bad: tuple[tuple[bytes, str], ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """True if nothing is wrong."""
        return not self.bad and not self.problems


class Collected(msgspec.Struct, frozen=True):
    """What ``gc`` removed: unreachable turns, and cache entries that were damaged or hung below one; bytes of files."""

    turns: int
    entries: int
    bytes_before: int
    bytes_after: int


def _attempt(problems: list[str], step: Callable[[], None]) -> None:
    try:
        step()
    except (CtxReuseError, lmdb.Error, AssertionError, ValueError) as error:
        problems.append(str(error))


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> Verdict:
    """Read all of the store in folder ``path`` and compare links, records and checksums. Changes nothing.

    Works beside the process that owns it, on the newest commit. Parts that are not there count as empty. Raises
    StoreError if there is no store at all.
    """
    place = folder(path, readonly=True)
    problems: list[str] = []
    counts = {"blocks": 0, "states": 0, "sessions": 0, "turns": 0}
    bad: list[tuple[bytes, str]] = []
    if not any((place / part / "data.mdb").exists() for part in ("ledger", "blocks")):
        raise StoreError("there is no store here", where=str(place), fix="Open it for writing once to create it")

    def ledger() -> None:
        with Ledger.open(place, readonly=True) as opened:
            stats = opened.stats()
            counts.update(sessions=stats.sessions, turns=stats.turns)
            opened.check()

    def blocks() -> None:
        env = open_readonly(place / "blocks")
        try:
            bad.extend(corrupt(env, progress))
            counts.update(zip(("blocks", "states"), _paired(env)))
        finally:
            env.close()

    for part, step in (("ledger", ledger), ("blocks", blocks)):
        if (place / part / "data.mdb").exists():
            _attempt(problems, step)
    return Verdict(**counts, bad=tuple(bad), problems=tuple(problems))


def _paired(env: Env) -> tuple[int, int]:
    """Blocks and states on disk; raises StoreError if their records say otherwise."""
    with env.read() as txn:
        entries = [Record.unpack(raw) for _, raw in txn.cursor(db=env.tables["meta"])]
        found = tuple(txn.stat(env.tables[name])["entries"] for name in ("blocks", "states"))
    noted = (sum(bool(entry.nbytes) for entry in entries), sum(bool(entry.state_nbytes) for entry in entries))
    if found != noted:
        raise StoreError(f"{found} blocks and states, {noted} records of them", where=str(env.path))
    return noted


def gc(path: str | os.PathLike[str], progress: Progress | None = None) -> Collected:
    """Remove turns that no session reaches and cache entries that are damaged. The store must have no owner.

    Files keep their size: freed pages are used again. Raises StoreOwnedError, StoreError.
    """
    place = folder(path, readonly=True)
    turns = entries = 0
    before = _size(place)
    if (place / "ledger" / "data.mdb").exists():
        with Ledger.open(place) as ledger:
            turns = ledger.gc()
    if (place / "blocks" / "data.mdb").exists():
        capacity = max(1 << 40, before)
        with BlockStore.open(place, capacity=capacity, progress=progress) as store:
            for key, _ in store.verify(progress):
                store.drop(key, "corrupt")
            store.flush()
            entries = sum(store.stats().dropped.values())
    return Collected(turns, entries, before, _size(place))


def _size(place: Path) -> int:
    return sum(file.stat().st_size for file in place.glob("*/data.mdb"))
