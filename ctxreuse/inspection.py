"""What a cache holds, counted from its records alone, while its owner may be at work."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ctxreuse.errors import StoreError
from ctxreuse.levels import rank, short
from ctxreuse.store.chunks import FOLDER, ChunkIndex
from ctxreuse.store.readonly import open_readonly
from ctxreuse.store.recovery import Unusable, records

__all__ = ["Held", "held"]


class Held(msgspec.Struct, frozen=True):
    """Entries of a cache, tokens of its blocks, bytes in whole pages, bytes of the file; ``levels``: blocks, their
    tokens and bytes of all that is kept at each level, cards left out; ``chunks``: runs of tokens that any prompt can
    find in the blocks, or could."""

    blocks: int
    states: int
    tokens: int
    nbytes: int
    file_bytes: int
    levels: dict[str, tuple[int, int, int]] = {}
    chunks: int = 0


def held(folder: Path) -> Held:
    """Counts of the cache in ``folder``; reads no value. Raises StoreError if there is none or it cannot be read."""
    env = open_readonly(folder / "blocks")
    try:
        rows = [record for _, record in records(env)]
        file_bytes = env.file_bytes()
    except Unusable as error:
        fix = "It is rebuilt when it is next opened for writing"
        raise StoreError(f"the cache cannot be used: {error}", where=str(folder), fix=fix) from None
    finally:
        env.close()
    known = ChunkIndex.open(folder / FOLDER, readonly=True)
    try:
        chunks = len(known)
    finally:
        known.close()
    levels: dict[str, tuple[int, int, int]] = {}
    for row in rows:
        for level, count, tokens, nbytes in (
            (row.level, 1, row.tokens, row.nbytes),
            (row.state_level, 0, 0, row.state_nbytes),
        ):
            if nbytes:
                before = levels.get(short(level), (0, 0, 0))
                levels[short(level)] = before[0] + count, before[1] + tokens, before[2] + nbytes
    return Held(
        blocks=sum(row.nbytes > 0 for row in rows),
        states=sum(row.state_nbytes > 0 for row in rows),
        tokens=sum(row.tokens for row in rows if row.nbytes),
        nbytes=sum(row.nbytes + row.state_nbytes for row in rows),
        file_bytes=file_bytes,
        levels=dict(sorted(levels.items(), key=lambda entry: rank(entry[0]))),
        chunks=chunks,
    )
