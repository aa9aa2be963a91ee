"""Partial blocks: the tokens at the end of a context that fill no block, stored until the context has grown beyond.

Without them a context that comes back from the store computes up to a block of tokens that it had. A partial block has
the key of its tokens after its parent, like any other, but is none of its context's keys: it is found by trying the
lengths that it may have. It is never coded, and no other node is offered it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ctxreuse.block.levels import allowed_by, is_raw
from ctxreuse.identity.keys import PrefixHasher, prefix_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxreuse.engines.base import Context, Engine
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.runtime.request import ContextRecord
    from ctxreuse.store.base import Store
    from ctxreuse.store.types import Entry

__all__ = ["PartialBlocks", "stored_partials"]

#: Tokens of one, at least: computing fewer takes about as long as storing and loading them.
_LEAST = 8


def stored_partials(store: Store, space: ModelSpace, salt: bytes, parent: bytes, tokens: Tokens) -> list[Entry]:
    """Return the stored partial blocks after ``parent`` that ``tokens`` begin with, the longest first."""
    size = space.block_tokens
    keys = PrefixHasher(space.digest, salt, size).partial_keys(tokens[: size - 1].tobytes(), parent, _LEAST)
    return [entry for entry in reversed(store.entries(keys)) if entry is not None]


class PartialBlocks:
    """Those of one tenant's contexts in one model space, which needs no states. Any thread may call."""

    def __init__(self, engine: Engine, salt: bytes) -> None:
        self._engine, self._space, self._salt = engine, engine.space, salt
        #: The one that was stored last of contexts that may be used again.
        self._of: WeakKeyDictionary[Context, bytes] = WeakKeyDictionary()

    def find(self, store: Store, parent: bytes, tokens: Tokens, max_kl: float | None) -> tuple[bytes, int] | None:
        """Return the key and the length of the longest that may be loaded after ``parent`` as part of ``tokens``."""
        for entry in stored_partials(store, self._space, self._salt, parent, tokens):
            if is_raw(entry.level) and allowed_by(entry.level, max_kl):
                return entry.key, entry.tokens
        return None

    def keep(self, store: Store, context: Context, record: ContextRecord, keys: Sequence[bytes]) -> None:
        """Store that of a context whose whole blocks are stored as ``keys``, and drop the one that it had before."""
        whole, left = divmod(context.n, self._space.block_tokens)
        before, key = self._of.pop(context, record.partial), b""
        if len(keys) == whole > 0 and left >= _LEAST:
            key = prefix_key(self._space.digest, self._salt, keys[-1], context.tokens[-left:])
            if store.entries([key])[0] is None:
                (data,) = self._engine.export(context, [key], keys[-1], whole, last_partial=True)
                store.put(key, data, max_kl=record.request.max_kl)
            self._of[context] = key
        if before and before != key:
            store.drop(before, "superseded")
