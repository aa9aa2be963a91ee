"""Counts of a block cache from its records alone, also beside the process that owns it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ctxreuse.block.levels import family, quality_key
from ctxreuse.errors import StoreError
from ctxreuse.store.blocks.recovery import open_readonly
from ctxreuse.store.blocks.tables import records
from ctxreuse.store.chunks.index import FOLDER, ChunkIndex

__all__ = ["CacheSummary", "summarize_cache"]


class CacheSummary(msgspec.Struct, frozen=True):
    """Counts of entries, tokens of blocks, bytes in whole pages and of the file.

    ``levels``: blocks, tokens and bytes at each level, without profile; ``chunks``: entries of the chunk index.
    """

    blocks: int
    states: int
    tokens: int
    nbytes: int
    file_bytes: int
    levels: dict[str, tuple[int, int, int]] = {}
    chunks: int = 0


def summarize_cache(folder: Path) -> CacheSummary:
    """Count the cache in ``folder``, reading no value. Raises StoreError if there is none or it cannot be read."""
    env = open_readonly(folder / "blocks")
    try:
        rows = [record for _, record in records(env)]
        file_bytes = env.file_bytes()
    except ValueError as error:
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
                before = levels.get(family(level), (0, 0, 0))
                levels[family(level)] = before[0] + count, before[1] + tokens, before[2] + nbytes
    return CacheSummary(
        blocks=sum(row.nbytes > 0 for row in rows),
        states=sum(row.state_nbytes > 0 for row in rows),
        tokens=sum(row.tokens for row in rows if row.nbytes),
        nbytes=sum(row.nbytes + row.state_nbytes for row in rows),
        file_bytes=file_bytes,
        levels=dict(sorted(levels.items(), key=lambda entry: quality_key(entry[0]))),
        chunks=chunks,
    )
