"""Looking into a store from outside, while its owner may be at work: what is corrupt, and dropping it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ctxreuse.errors import StoreError
from ctxreuse.store import BlockStore, Ledger, Progress
from ctxreuse.store.env import Env
from ctxreuse.store.records import footprint
from ctxreuse.store.recovery import TABLES, corrupt, records, sound

__all__ = ["Held", "bad_blocks", "bad_ledger", "forget", "held"]


class Held(msgspec.Struct, frozen=True):
    """What a cache holds: entries, tokens of its blocks, bytes in whole pages, bytes of the file."""

    blocks: int
    states: int
    tokens: int
    nbytes: int
    file_bytes: int


_MAP_SIZE = 1 << 30  # read only: LMDB maps the whole file whatever is asked for


def bad_blocks(folder: Path, progress: Progress | None = None) -> list[tuple[bytes, str]]:
    """Keys of corrupt blocks and states with what is wrong; the empty key stands for the file itself.

    Reads every value of the cache in ``folder``; no store there is nothing wrong. Changes nothing.
    """
    home = folder / "blocks"
    if not (home / "data.mdb").exists():
        return []
    try:
        env = Env(home, TABLES, map_size=_MAP_SIZE, readonly=True, durable=False)
    except Exception as error:
        # The file is not LMDB's, or not whole: which of its many ways to say so does not matter here.
        return [(b"", sound(home) or str(error))]
    try:
        return corrupt(env, progress)
    finally:
        env.close()


def held(folder: Path) -> Held:
    """Counts of the cache in ``folder``, from its records alone; zeros if there is none. Raises StoreError."""
    home = folder / "blocks"
    if not (home / "data.mdb").exists():
        return Held(0, 0, 0, 0, 0)
    with BlockStore.open(folder, readonly=True) as store:
        file_bytes = store.stats().file_bytes
    env = Env(home, TABLES, map_size=_MAP_SIZE, readonly=True, durable=False)
    try:
        rows = [record for _, record in records(env)]
    finally:
        env.close()
    return Held(
        blocks=sum(row.nbytes > 0 for row in rows),
        states=sum(row.state_nbytes > 0 for row in rows),
        tokens=sum(row.tokens for row in rows if row.nbytes),
        nbytes=sum(footprint(row.nbytes) + footprint(row.state_nbytes) for row in rows),
        file_bytes=file_bytes,
    )


def bad_ledger(folder: Path) -> str:
    """What is wrong with the ledger in ``folder``, or an empty string. Changes nothing."""
    if not (folder / "ledger" / "data.mdb").exists():
        return ""
    try:
        with Ledger.open(folder, readonly=True) as ledger:
            ledger.check()
    except (AssertionError, StoreError) as error:
        return str(error)
    return ""


def forget(folder: Path, keys: Sequence[bytes]) -> int:
    """Drop entries and all below them; returns how many went. Raises StoreOwnedError while another owns it."""
    with BlockStore.open(folder) as store:
        before = store.stats()
        for key in keys:
            store.drop(key, "corrupt")
        store.flush()
        after = store.stats()
    return before.blocks + before.states - after.blocks - after.states
