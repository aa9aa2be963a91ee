"""Contexts that stay in the engine's memory after their request, so that the next turn needs no load."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ctxreuse.block.levels import EXACT, quality_key
from ctxreuse.engines.base import is_lost
from ctxreuse.engines.provenance import leading
from ctxreuse.errors import EngineDiedError
from ctxreuse.identity.keys import Tokens, common_prefix

if TYPE_CHECKING:
    from ctxreuse.engines.base import Context, Engine
    from ctxreuse.runtime.compress import ContextCompressor

__all__ = ["ContextCache"]


def _begins(tokens: Tokens, front: Tokens) -> bool:
    return 0 < len(front) <= len(tokens) and bool((front == tokens[: len(front)]).all())


class ContextCache:
    """Finished contexts, least recently used first, within ``capacity`` bytes. Any thread may call.

    When there are more, ``compressor`` makes those smaller whose sessions allow it, before any is evicted. Those whose
    engine's process has died are forgotten.
    """

    def __init__(self, capacity: int, compressor: ContextCompressor | None = None) -> None:
        self.capacity, self._compressor = capacity, compressor
        self._lock = threading.Lock()
        self._contexts: list[Context] = []
        #: Of those that could be made smaller, what their sessions allow.
        self._max_kl: WeakKeyDictionary[Context, float] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._contexts)

    @property
    def nbytes(self) -> int:
        """Bytes of KV in all contexts."""
        return sum(context.nbytes for context in self._contexts if not is_lost(context))

    def put(self, context: Context, max_kl: float | None = None) -> None:
        """Keep a context; compress, then evict the least recently used ones while there is too much.

        ``max_kl``: what its session allows.
        """
        with self._lock:
            self._contexts = [one for one in (*self._contexts, context) if not is_lost(one)]
            if max_kl is not None and self._compressor is not None:
                self._max_kl[context] = max_kl
            while self._contexts and self.nbytes > self.capacity:
                self._free_one()

    def _free_one(self) -> int:
        """Compress the least recently used context that can be, or evict the first; returns the bytes freed."""
        one = next((one for one in self._contexts if one in self._max_kl), None)
        if one is None or self._compressor is None:
            return self._contexts.pop(0).nbytes
        before = one.nbytes
        self._compressor.compress(one, self._max_kl.pop(one))
        return max(before - one.nbytes, 0)

    def take(
        self, engine: Engine, tokens: Tokens, stored: int, max_kl: float | None = None
    ) -> tuple[Context, int] | None:
        """Remove and return the context that shares most with ``tokens``, cropped to the shared part, and its length.

        None unless more tokens are shared than the ``stored`` ones of the store. At least the last of ``tokens`` is
        left to compute, and only KV within ``max_kl`` is shared.
        """
        with self._lock:
            best, length = self._best(engine, tokens, stored, max_kl)
            if best is None:
                return None
            self._contexts.remove(best)
            self._max_kl.pop(best, None)
        try:
            if best.n > length and not engine.crop(best, length):
                self.put(best)
                return None
        except EngineDiedError:
            return None
        return best, length

    def match(self, engine: Engine, tokens: Tokens, stored: int, max_kl: float | None = None) -> int:
        """Return how many leading tokens `take` would return, at least ``stored``. Pure."""
        with self._lock:
            return self._best(engine, tokens, stored, max_kl)[1]

    def _best(self, engine: Engine, tokens: Tokens, stored: int, max_kl: float | None) -> tuple[Context | None, int]:
        best, length = None, stored
        for context in self._contexts:
            if is_lost(context):
                continue
            shared = min(common_prefix(context.tokens, tokens), len(tokens) - 1, leading(context.levels, max_kl))
            if shared < context.n and engine.space.needs_state:
                # Such a context can be cut back only to a state.
                shared = max((at for at in context.states if at <= shared), default=0)
            # Cropping destroys the rest of that context, so the rest must be the smaller part of it.
            if shared > length and 2 * shared >= context.n:
                best, length = context, shared
        return best, length

    def drop(self, tokens: Tokens) -> int:
        """Forget all contexts that begin with the same token; returns how many."""
        with self._lock:
            kept = [context for context in self._contexts if not common_prefix(context.tokens, tokens)]
            dropped = len(self._contexts) - len(kept)
            self._contexts = kept
        return dropped

    def cached_bytes(self, tokens: Tokens) -> int:
        """Return the bytes of the contexts that ``tokens`` begin with, which `release` would free. Pure."""
        with self._lock:
            return sum(context.nbytes for context in self._contexts if _begins(tokens, context.tokens))

    def release(self, tokens: Tokens, *, beyond: int = 0) -> int:
        """Forget the contexts of more than ``beyond`` tokens that ``tokens`` begin with; returns their bytes."""
        with self._lock:
            dropped = [context for context in self._contexts if context.n > beyond and _begins(tokens, context.tokens)]
            self._contexts = [context for context in self._contexts if context not in dropped]
        return sum(context.nbytes for context in dropped)

    def prune(self) -> None:
        """Forget contexts whose engine's process has ended."""
        with self._lock:
            self._contexts = [context for context in self._contexts if not is_lost(context)]

    def evict(self, nbytes: int) -> int:
        """Compress or forget the least recently used contexts until ``nbytes`` bytes are free; returns the bytes."""
        freed = 0
        with self._lock:
            while self._contexts and freed < nbytes:
                freed += self._free_one()
        return freed

    def levels(self) -> dict[str, tuple[int, int]]:
        """Return contexts and tokens by the level of the worst of their KV. Pure."""
        found: dict[str, tuple[int, int]] = {}
        with self._lock:
            for context in self._contexts:
                level = max((run.level for run in context.levels), key=quality_key, default=EXACT)
                contexts, tokens = found.get(level, (0, 0))
                found[level] = contexts + 1, tokens + context.n
        return found

    def tokens(self) -> list[Tokens]:
        """Return the token ids of all contexts, the most recently used last. Pure."""
        with self._lock:
            return [context.tokens.copy() for context in self._contexts if not is_lost(context)]

    def clear(self) -> None:
        """Forget all contexts."""
        with self._lock:
            self._contexts.clear()

    def check(self) -> None:
        """Raise AssertionError if a context is cached twice or the capacity is exceeded."""
        with self._lock:
            assert len({id(context) for context in self._contexts}) == len(self._contexts), "a context is cached twice"
            assert self.nbytes <= self.capacity or not self._contexts, (
                f"{self.nbytes} bytes in a cache of {self.capacity}"
            )
