"""Maintenance of a store: compare all values with their checksums, delete what is unreachable."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import lmdb
import msgspec

from ctxreuse.errors import StoreError
from ctxreuse.store.blocks.recovery import open_readonly
from ctxreuse.store.blocks.store import BlockStore
from ctxreuse.store.blocks.tables import TABLES as BLOCK_TABLES
from ctxreuse.store.blocks.tables import corrupt, counts, records
from ctxreuse.store.ledger.ledger import Ledger
from ctxreuse.store.ledger.opening import TABLES as LEDGER_TABLES
from ctxreuse.store.ledger.opening import NotBegunError, damaged
from ctxreuse.store.lmdb import apart
from ctxreuse.store.lmdb.env import Env
from ctxreuse.store.lmdb.owner import folder, last_use
from ctxreuse.store.lmdb.recovery import examine, tables_in
from ctxreuse.store.types import Progress

__all__ = ["PARTS", "Collected", "Verdict", "gc", "read_blocks", "read_ledger", "verify"]

#: Parts of a store, by the names of their folders.
PARTS = ("ledger", "blocks")
_TABLES = {"ledger": LEDGER_TABLES, "blocks": BLOCK_TABLES}
_REBUILT = "It is rebuilt when it is next opened for writing"


class Verdict(msgspec.Struct, frozen=True):
    """The result of `verify`: counts of entries, keys of damaged values with the error, other problems.

    ``unchecked``: turns of an earlier version, which have no checksum. ``not_begun``: parts whose
    creator ended before anything was in them; the next one that opens them for writing goes on.
    """

    blocks: int
    states: int
    sessions: int
    turns: int
    bad: tuple[tuple[bytes, str], ...] = ()
    problems: tuple[str, ...] = ()
    unchecked: int = 0
    not_begun: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """True if nothing is wrong."""
        return not self.bad and not self.problems


class Collected(msgspec.Struct, frozen=True):
    """The result of `gc`: unreachable turns, cache entries that were damaged or below one, and bytes of files."""

    turns: int
    entries: int
    bytes_before: int
    bytes_after: int


def verify(path: str | os.PathLike[str], progress: Progress | None = None, *, parts: Sequence[str] = PARTS) -> Verdict:
    """Read all of the store in folder ``path`` and compare pages, links, records and checksums. Changes nothing.

    Works beside the process that owns it, on the newest commit. Pages are walked first; LMDB then reads in a process of
    its own, so that nothing it meets ends this one. Missing parts count as empty.

    Raises StoreError if there is no store at all.
    """
    place = folder(path, readonly=True)
    present = [part for part in parts if (place / part / "data.mdb").exists()]
    if not present:
        raise StoreError("there is no store here", where=str(place), fix="Open it for writing once to create it")
    verdict = Verdict(0, 0, 0, 0)
    for part in present:
        try:
            found = _verify_part(place, part, progress)
        except StoreError as error:
            found = Verdict(0, 0, 0, 0, problems=(str(error),))
        verdict = Verdict(*(mine + other for mine, other in zip(*map(msgspec.structs.astuple, (verdict, found)))))
    return verdict


def _verify_part(place: Path, part: str, progress: Progress | None) -> Verdict:
    home = place / part
    if not (home / "data.mdb").stat().st_size and (part != "ledger" or not last_use(place, part).stamp):
        return Verdict(0, 0, 0, 0, not_begun=(part,))
    wrong = examine(home)
    if wrong:
        raise damaged(home, wrong) if part == "ledger" else StoreError(f"the cache is damaged: {wrong}", fix=_REBUILT)
    if tables_in(home) < len(_TABLES[part]):
        return Verdict(0, 0, 0, 0, not_begun=(part,))
    found = apart.call(f"{__name__}:read_{part}", str(place), where=home, progress=progress)
    return msgspec.convert(found, Verdict)


def read_ledger(place: str, *, progress: Progress) -> Verdict:
    """Read all of a ledger whose pages are sound. See `apart.call`."""
    try:
        with Ledger.open(place, readonly=True) as opened:
            result = opened.verify(progress)
    except NotBegunError:
        return Verdict(0, 0, 0, 0, not_begun=("ledger",))
    stats = result.stats
    return Verdict(0, 0, stats.sessions, stats.turns, problems=result.problems, unchecked=result.unchecked)


def read_blocks(place: str, *, progress: Progress) -> Verdict:
    """Read all of a cache whose pages are sound. See `apart.call`."""
    env = open_readonly(Path(place) / "blocks")
    try:
        bad = tuple(corrupt(env, progress))
        try:
            return Verdict(*_counts(env), 0, 0, bad=bad)
        except (StoreError, ValueError) as error:
            return Verdict(0, 0, 0, 0, bad=bad, problems=(str(error),))
    except (lmdb.Error, ValueError) as error:
        return Verdict(0, 0, 0, 0, problems=(str(error),))
    finally:
        env.close()


def _counts(env: Env) -> tuple[int, int]:
    """Return the number of blocks and states. Raises StoreError if their records differ."""
    rows = [record for _, record in records(env)]
    noted = sum(row.nbytes > 0 for row in rows), sum(row.state_nbytes > 0 for row in rows)
    found = counts(env)[:2]
    if found != noted:
        raise StoreError(f"{found} blocks and states, {noted} records of them", where=str(env.path))
    return noted


def gc(path: str | os.PathLike[str], progress: Progress | None = None) -> Collected:
    """Delete turns that no session reaches and cache entries that are damaged. The store must have no owner.

    Files keep their size: freed pages are reused. Raises StoreOwnedError, StoreError.
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
