"""One engine, one store, one tenant: prompts in, logits or answers out, KV reused and kept on the way.

Text is durable elsewhere; here KV is a cache. A miss, a corrupt block or a store that fails costs a recompute, which is
counted in ``Usage``, and never fails the request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ctxreuse.engines.base import check_vocabulary
from ctxreuse.errors import ContextTooLongError, EngineError, StoreError
from ctxreuse.keys import ROOT, Tokens, as_tokens, prefix_keys, tenant_salt
from ctxreuse.runtime.advance import advance
from ctxreuse.runtime.completion import Completion
from ctxreuse.runtime.load import SpoiledError, load_prefix
from ctxreuse.runtime.pool import LivePool
from ctxreuse.runtime.usage import Prefilled, Usage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ctxreuse.engines.base import Engine, Live, Logits
    from ctxreuse.engines.sampling import Sampling
    from ctxreuse.engines.text import TextModel
    from ctxreuse.metrics import Metrics
    from ctxreuse.store.base import WholeStore

__all__ = ["Runtime"]

_ABSENT = "absent"

# Seconds to wait for a full queue of writes: at 0.1 GB/s the default queue of 256 MiB is empty in three.
_PATIENCE = 10.0


class Runtime:
    """Any thread may call; computing is serialised by a lock that is held for one step of one request at a time.

    ``store``: where blocks are kept (None: only in memory); it stays the caller's to close. ``text``: how text becomes
    tokens, for `complete` (default: the engine's own). ``tenant``: whose keys these are. ``live_bytes``: how much KV of
    finished requests stays in the engine's memory, so that the next turn of the same context needs no load.
    ``metrics``: where finished answers are counted. ``clock``: seconds, for ``Usage``; it must never go back.
    """

    def __init__(
        self,
        engine: Engine,
        store: WholeStore | None = None,
        *,
        text: TextModel | None = None,
        tenant: str = "default",
        live_bytes: int = 1 << 30,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine, self.store, self.tenant = engine, store, tenant
        self.text: TextModel | None = text if text is not None else getattr(engine, "text", None)
        self.metrics = metrics
        self.pool = LivePool(live_bytes)
        self.compute = threading.Lock()
        self._salt = tenant_salt(tenant)
        self._clock = clock

    def keys(self, tokens: Sequence[int] | Tokens) -> list[bytes]:
        """Prefix keys of the whole blocks of ``tokens`` in this engine's space for this tenant."""
        space = self.engine.space
        return prefix_keys(space.digest, self._salt, as_tokens(tokens), space.block_tokens)

    def prefill(self, tokens: Sequence[int] | Tokens, *, reserve: int = 0, branches: Sequence[int] = ()) -> Prefilled:
        """Bring ``tokens`` into the engine's memory, reusing the longest held prefix.

        The caller owns the result's ``live`` until ``release``. At least the last token is computed, for its logits.
        ``reserve``: room for this many further tokens. ``branches``: positions after which other contexts may go on
        differently, such as the ends of turns; models with states can be resumed there (see ``advance``). Raises
        EngineError for an empty prompt, ContextTooLongError, TokenRangeError.
        """
        ids = self.checked(tokens)
        with self.compute:
            store, missed, limit = self.store, "" if self.store is not None else "no store", len(ids)
            while True:
                try:
                    return self._prefill(ids, reserve, branches, store, limit, missed)
                except SpoiledError as spoiled:
                    # Each round asks for fewer blocks, so this ends at the latest with none.
                    limit, missed = spoiled.usable, spoiled.reason
                except StoreError:
                    store, missed = None, "unreadable"

    def complete(
        self, tokens: Sequence[int] | Tokens, sampling: Sampling, *, branches: Sequence[int] = ()
    ) -> Completion:
        """Answer a prompt: an iterator of pieces. The prompt is checked now and computed at the first ``next``.

        ``branches``: see ``prefill``, which also says what is raised; EngineError without a tokenizer.
        """
        return Completion(self, self.checked(tokens), sampling, branches)

    def warm(self, tokens: Sequence[int] | Tokens, *, branches: Sequence[int] = ()) -> Usage:
        """Compute a context now and keep its KV, so that a later request finds it. ``branches``: see ``prefill``."""
        done = self.prefill(tokens, branches=branches)
        self.release(done.live)
        return done.usage

    def release(self, live: Live) -> None:
        """Take a finished context back: its new blocks and states go to the store, the rest stays in the pool."""
        with self.compute:
            self._keep(live)
        self.pool.put(live)

    def forget(self, tokens: Sequence[int] | Tokens) -> int:
        """Drop the KV of ``tokens`` that no other context shares; returns how many blocks went. Text is untouched."""
        ids = as_tokens(tokens)
        self.pool.drop(ids)
        if self.store is None:
            return 0
        self.store.flush()
        return self.store.forget(self.keys(ids))

    def close(self) -> None:
        """Let go of the contexts in memory. The store belongs to whoever opened it."""
        self.pool.clear()

    def checked(self, tokens: Sequence[int] | Tokens) -> Tokens:
        """The prompt as int32 ids; raises as ``prefill`` does."""
        ids, space = as_tokens(tokens), self.engine.space
        if not len(ids):
            raise EngineError("the context is empty", fix="Give at least one token: there is nothing to continue")
        check_vocabulary(space, ids)
        if len(ids) > space.max_tokens:
            raise ContextTooLongError(
                f"the context has {len(ids):,} tokens and the model takes {space.max_tokens:,}",
                where=space.architecture,
                fix="Fork from an earlier turn, roll back, or shorten the documents",
            )
        return ids

    def _prefill(
        self, ids: Tokens, reserve: int, branches: Sequence[int], store: WholeStore | None, limit: int, missed: str
    ) -> Prefilled:
        engine, space = self.engine, self.engine.space
        size = space.block_tokens
        keys = self.keys(ids)
        usable = keys[: min(limit, (len(ids) - 1) // size)]
        started = self._clock()
        stored = 0
        if store is not None:
            held = store.match(usable)
            stored = held.state_tokens if space.needs_state else held.tokens

        taken = self.pool.take(engine, ids, stored)
        if taken is not None:
            live, reused = taken
            logits = advance(engine, live, ids[reused:], branches)
            missed = missed or (_ABSENT if len(ids) - reused > size else "")
            return self._result(live, logits, ids, {"device": reused}, missed, started, started)

        live = engine.start(len(ids) + reserve)
        missed = missed or (_ABSENT if len(usable) * size > stored else "")
        loaded, sources = started, {}
        if store is not None and stored:
            done = load_prefix(engine, store, live, ids, usable[: stored // size], branches, self._clock)
            loaded, sources, logits = done.at, done.sources, done.logits
            missed = missed or done.missed
        else:
            logits = advance(engine, live, ids, branches)
        return self._result(live, logits, ids, sources, missed, started, loaded)

    def _put_later(self, store: WholeStore, key: bytes, data: npt.NDArray[np.uint8]) -> bool:
        """A full queue refuses the tail of a long context: here nobody waits for an answer, so wait for the queue."""
        try:
            store.flush(_PATIENCE)
        except StoreError:
            return False
        return store.put(key, data)

    def _result(
        self,
        live: Live,
        logits: Logits,
        ids: Tokens,
        sources: dict[str, int],
        missed: str,
        started: float,
        loaded: float,
    ) -> Prefilled:
        now = self._clock()
        return Prefilled(
            live, logits, Usage(len(ids), sum(sources.values()), sources, missed, loaded - started, now - loaded)
        )

    def _keep(self, live: Live) -> None:
        """Offer the store the whole blocks and states of ``live`` that it lacks; stop at the first refusal."""
        store, space = self.store, self.engine.space
        if store is None:
            return
        keys = self.keys(live.tokens)
        held = store.match(keys).blocks
        fresh = keys[held:]
        if fresh:
            parent = keys[held - 1] if held else ROOT
            for key, data in zip(fresh, self.engine.export(live, fresh, parent, held)):
                if not (store.put(key, data) or self._put_later(store, key, data)):
                    return
        for position in live.states:
            n = position // space.block_tokens
            if 0 < n <= len(keys) and store.match(keys[:n]).state_tokens < position:
                parent = keys[n - 2] if n > 1 else ROOT
                store.put(keys[n - 1], self.engine.export_state(live, keys[n - 1], parent, position), kind="state")
