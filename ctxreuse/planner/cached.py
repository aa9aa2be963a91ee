"""How much of a prompt is cached, one part after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ctxreuse.identity.keys import ROOT, PrefixHasher
from ctxreuse.tree import Match

__all__ = ["CachedPrefixes", "PlannedPrefix"]


class PlannedPrefix(NamedTuple):
    """Some parts in a row. ``reach``: their leading tokens that are cached; ``alive``: all of their blocks are.

    ``parent`` is the key of the last whole block, ``blocks`` its number, ``rest`` the ids behind it, as bytes.
    """

    parent: bytes = ROOT
    blocks: int = 0
    rest: bytes = b""
    reach: int = 0
    alive: bool = True


class CachedPrefixes:
    """Asks the context tree which prefixes are cached. The keys are those of one model space and one tenant, so that
    nothing of another tenant is ever seen.

    Args:
        match: the tree's or store's: how many leading keys are cached. A key names all that stands before it, so that
            only those of new blocks are asked for.
        space, salt: of the keys.
        block_tokens: of the model space.
        states: only what ends in a stored state can be reused.
    """

    def __init__(
        self,
        match: Callable[[Sequence[bytes]], Match],
        space: bytes,
        salt: bytes,
        block_tokens: int,
        *,
        states: bool = False,
    ) -> None:
        self._match, self._hasher, self._states = match, PrefixHasher(space, salt, block_tokens), states

    def extend(self, prefix: PlannedPrefix, raw: bytes) -> PlannedPrefix:
        """Return the prefix with a part behind it, whose token ids are little-endian int32 bytes. About 3 µs where its
        first block is not cached."""
        parent, blocks, rest, reach, alive = prefix
        if not alive:
            return prefix
        size, wanted = self._hasher.block_bytes, len(raw)
        if len(rest) + wanted < size:
            return PlannedPrefix(parent, blocks, rest + raw, reach)
        # Most candidates fail at their first block: the others are hashed only behind one that is cached.
        taken = size - len(rest)
        keys = [self._hasher.key(rest + raw[:taken], parent)]
        while keys:
            found = self._match(keys)
            if usable := found.state_blocks if self._states else found.blocks:
                reach = (blocks + usable) * (size // 4)
            if found.blocks < len(keys):
                return PlannedPrefix(parent, blocks, b"", reach, False)
            parent, blocks = keys[-1], blocks + len(keys)
            whole = taken + (wanted - taken) // size * size
            keys, taken = self._hasher.keys(raw[taken:whole], parent), whole
        return PlannedPrefix(parent, blocks, raw[taken:], reach)
