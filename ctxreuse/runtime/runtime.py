"""One engine, one store, one tenant: prompts in, logits or answers out, KV reused and kept on the way.

Text is durable elsewhere; here KV is a cache. A miss, a corrupt block or a store that fails costs a recompute, which is
counted in ``Usage``, and never fails the request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random, SystemRandom
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ctxreuse.cost import CostModel
from ctxreuse.engines.base import check_vocabulary
from ctxreuse.engines.moving import Mover
from ctxreuse.errors import ConfigError, ContextTooLongError, EngineError, StoreError
from ctxreuse.keys import ROOT, Tokens, as_tokens, prefix_keys, tenant_salt
from ctxreuse.levels import check_lossy
from ctxreuse.pauses import kind_of
from ctxreuse.reuse import is_time
from ctxreuse.runtime.anywhere import Anywhere
from ctxreuse.runtime.completion import Completion
from ctxreuse.runtime.fetching import Fetching, ask
from ctxreuse.runtime.homing import Homing
from ctxreuse.runtime.keeping import Keeping
from ctxreuse.runtime.pool import LivePool
from ctxreuse.runtime.prompt import Prompt
from ctxreuse.runtime.storing import Storing
from ctxreuse.runtime.usage import Prefilled, Usage
from ctxreuse.runtime.waiting import Waiting
from ctxreuse.store.policy.states import StatePolicy
from ctxreuse.why import About, RequestBook, Why, explain

if TYPE_CHECKING:
    from ctxreuse.engines.base import Engine, Live
    from ctxreuse.engines.sampling import Sampling
    from ctxreuse.engines.text import TextModel
    from ctxreuse.metrics import Metrics
    from ctxreuse.pauses import Kind
    from ctxreuse.reuse import Gate
    from ctxreuse.runtime.recording import Recorder
    from ctxreuse.runtime.remote import Remote
    from ctxreuse.store.base import WholeStore

__all__ = ["Runtime"]

_MEASURE = "To reuse documents in any order: `ctxreuse calibrate NAME --chunks`"
#: Every so many prompts the store's policy hears what computing takes.
_PRICED = 32


class Runtime:
    """Any thread may call; computing is serialised by a lock that is held for one step of one request at a time.

    ``store``: where blocks are kept (None: only in memory); it stays the caller's to close. ``text``: how text becomes
    tokens, for `complete` (default: the engine's own). ``tenant``: whose keys these are. ``live_bytes``: how much KV of
    finished requests stays in the engine's memory, so that the next turn of the same context needs no load.
    ``metrics``: where finished answers are counted. ``remote``: other nodes, asked for what is held neither in memory
    nor in the store, where that is predicted to be quicker than computing it. ``cost``: what this engine's work takes,
    learnt on the way (default: a new model of cost if there is a ``remote``, or ``repair`` is a time; else nothing).
    ``clock``: seconds, for ``Usage`` and costs; it must never go back. ``rng``: chooses what is sampled of a peer's
    blocks.
    ``states``: where states of contexts are kept, and how much is rather replayed.
    ``requests``: where requests are remembered, so that they can explain their misses; it stays the caller's to close
    (default: in memory). ``recorder``: where requests are recorded as hashes and counts; it stays the caller's to close
    (default: nowhere).

    ``gate``: what has been measured of moving KV to other positions (default: the chunk card on this user's shelf, as
    soon as there is one). ``repair``: the most that mending what is moved may compute, as a share of it, in tokens or
    as a time (``10%``, ``64``, ``200ms``): the best repair within that is chosen, and none moves anything that would
    need more; "": as little as the level that a request allows asks for.

    ``lossy`` is everywhere the name of the worst level of KV that a request may reuse and leave behind, such as
    ``kl-0.01``; None: exact ones only. What was computed on top of lossy KV is kept as such, for those who allow it.
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
        remote: Remote | None = None,
        cost: CostModel | None = None,
        rng: Random | None = None,
        clock: Callable[[], float] = time.perf_counter,
        requests: RequestBook | None = None,
        recorder: Recorder | None = None,
        states: StatePolicy | None = None,
        gate: Gate | None = None,
        repair: str = "",
    ) -> None:
        self.requests = requests if requests is not None else RequestBook()
        self.engine, self.store, self.tenant = engine, store, tenant
        self.text: TextModel | None = text if text is not None else getattr(engine, "text", None)
        self.metrics, self.remote, self.recorder = metrics, remote, recorder
        learns = remote is not None or is_time(repair)
        self.cost = CostModel() if cost is None and learns else cost
        self.pool = LivePool(live_bytes)
        self.waiting = Waiting(self.pool, store, self.keys, clock, self._paused)
        self.keeping = Keeping(engine.space, StatePolicy() if states is None else states)
        self._prompts = 0
        self.compute = threading.Lock()
        self._salt = tenant_salt(tenant)
        moves = store is not None and isinstance(engine, Mover)
        self.homing = Homing(store, engine.space, self._salt) if store is not None and moves else None
        self.anywhere = Anywhere(engine, self._salt, gate, repair, self.homing)
        self.storing = Storing(engine, self.keeping, self.keys, self._salt)
        self.clock, self._rng = clock, rng if rng is not None else SystemRandom()
        if store is not None and engine.codec is not None:
            store.adopt(engine.codec)

    def keys(self, tokens: Sequence[int] | Tokens) -> list[bytes]:
        """Prefix keys of the whole blocks of ``tokens`` in this engine's space for this tenant."""
        space = self.engine.space
        return prefix_keys(space.digest, self._salt, as_tokens(tokens), space.block_tokens)

    def permit(self, lossy: str | None) -> None:
        """Raises ConfigError, saying what to do, unless ``lossy`` is None or a level that there is a card for: one that
        names it, or a chunk card, by which any level says how far moved KV may be off."""
        if lossy is None:
            return
        check_lossy(lossy)
        if self.anywhere.gate.card is not None:
            return
        if self.engine.codec is None:
            raise ConfigError("this engine has no codec", fix=f"{_MEASURE}; or leave lossy= out, for exact KV only")
        try:
            self.engine.codec.info(lossy)
        except ConfigError as error:
            raise ConfigError(error.what, where=error.where, fix=f"{error.fix}; {_MEASURE}") from None

    def prefill(
        self,
        tokens: Sequence[int] | Tokens,
        *,
        reserve: int = 0,
        branches: Sequence[int] = (),
        parts: Sequence[int] = (),
        lossy: str | None = None,
        about: About | None = None,
    ) -> Prefilled:
        """Bring ``tokens`` into the engine's memory, reusing the longest held prefix.

        The caller owns the result's ``live`` until ``release``. At least the last token is computed, for its logits.
        ``reserve``: room for this many further tokens. ``branches``: positions after which other contexts may go on
        differently, such as the ends of turns. A model with states can be resumed there while the context is in memory,
        and from the store once a second context has parted there (see `StatePolicy`). ``parts``: positions at which
        parts end (turns, documents, tool results), each of which was encoded by itself: with ``lossy`` they are found
        wherever else they stood (see `Anywhere`). ``about``: whose request it is, and its parts, for those who ask why
        it missed. Raises EngineError for an empty prompt, ContextTooLongError, TokenRangeError, ConfigError (see
        `permit`).
        """
        ids = self.checked(tokens)
        self.permit(lossy)
        recorded = -1 if self.recorder is None else self.recorder.prompt(self.keys(ids), len(ids))
        self._tell(ids)
        fetching = None if self.remote is None else self._ask(self.remote, ids, lossy)
        try:
            if fetching is not None:
                fetching.prepare()
            with self.compute:
                prompt = Prompt(self, ids, reserve, branches, fetching, lossy, parts)
                done = prompt.bring()
            if fetching is not None and fetching.tokens:
                late = fetching.late() if self.store is not None else None
                self.storing.arrivals.note(done.live, fetching.views, late)
            self._note(done, prompt, about, lossy)
            done.recorded = recorded
            return done
        finally:
            if fetching is not None:
                fetching.close()

    def _tell(self, ids: Tokens) -> None:
        """The store's policy hears of every prompt, and now and then what computing takes here."""
        if self.store is None:
            return
        self.store.asked(self.keys(ids), self.engine.space.block_tokens)
        self._prompts += 1
        found = self.cost.prefill.coefficients if self.cost is not None and self._prompts % _PRICED == 1 else None
        if found is not None:
            self.store.price(found[1], found[2])

    def _paused(self, keys: Sequence[bytes], label: int) -> None:
        if self.recorder is not None:
            self.recorder.mark(keys, label)

    def mark(self, tokens: Sequence[int] | Tokens, label: int) -> None:
        """The context ``tokens`` paused for the reason ``label`` (see `ctxreuse.pauses`); the store's policy learns."""
        if self.store is not None:
            self.store.mark(self.keys(tokens), label)

    def _note(self, done: Prefilled, prompt: Prompt, about: About | None, lossy: str | None) -> None:
        name, why = self.requests.note(
            about,
            prompt.ids,
            prompt.keys,
            done.usage,
            done.computed,
            space=self.engine.space,
            salt=self._salt,
            lossy=lossy,
            live=done.live,
            gone=self.store.gone if self.store is not None else _unknown,
        )
        done.usage = msgspec.structs.replace(done.usage, request=name, why=why)

    def why(self, request: str = "", *, session: str = "", others: bool = False) -> Why:
        """Explain what a request reused and what it did not: by its id (``Usage.request``), or the last one (of a
        ``session``). ``others``: the asker may know that another tenant has computed the same, and no more than that.

        Only requests of this runtime's tenant are explained. Raises SessionError for one that is not known (any more).
        """
        tenant = self.requests.tenant(self._salt)
        decode = self.text.decode if self.text is not None else None
        emptied = self.store.gone(ROOT) if self.store is not None else None
        return explain(
            self.requests, request, session=session, tenant=tenant, decode=decode, others=others, emptied=emptied
        )

    def complete(
        self,
        tokens: Sequence[int] | Tokens,
        sampling: Sampling,
        *,
        branches: Sequence[int] = (),
        parts: Sequence[int] = (),
        lossy: str | None = None,
        about: About | None = None,
        was: Kind | None = None,
    ) -> Completion:
        """Answer a prompt: an iterator of pieces. The prompt is checked now and computed at the first ``next``.

        ``branches``, ``parts``, ``about``: see ``prefill``, which also says what is raised; EngineError without a
        tokenizer.
        ``was``: what its session waited for since the last answer, if the prompt tells.
        """
        self.permit(lossy)
        return Completion(self, self.checked(tokens), sampling, branches, lossy, about, was, parts)

    def warm(
        self,
        tokens: Sequence[int] | Tokens,
        *,
        branches: Sequence[int] = (),
        parts: Sequence[int] = (),
        lossy: str | None = None,
        about: About | None = None,
    ) -> Usage:
        """Compute a context now and keep its KV, so that a later request finds it. The rest: see ``prefill``."""
        done = self.prefill(tokens, branches=branches, parts=parts, lossy=lossy, about=about)
        self.release(done.live, lossy=lossy)
        return done.usage

    def release(self, live: Live, *, lossy: str | None = None) -> None:
        """Take a finished context back: its new blocks and states go to the store, the rest stays in the pool.

        ``lossy``: at which levels the store may keep them.
        """
        with self.compute:
            keys = self.storing.keep(self.store, live, lossy)
        if self.store is not None and self.storing.index(self.store, live, keys) and self.homing is not None:
            self.homing.noted(keys)
        self.requests.kept(live, live.tokens, keys)
        self.pool.put(live)

    def forget(self, tokens: Sequence[int] | Tokens) -> int:
        """Drop the KV of ``tokens`` that no other context shares; returns how many blocks went. Text is untouched."""
        ids = as_tokens(tokens)
        self.pool.drop(ids)
        self.requests.forget(ids)
        if self.store is None:
            return 0
        self.store.flush()
        return self.store.forget(self.keys(ids))

    def pause(
        self, tokens: Sequence[int] | Tokens, kind: str, *, expect: float | None = None, lossy: str | None = None
    ) -> None:
        """The context waits now, for ``expect`` seconds if that is known. Raises ConfigError (see `pauses.kind_of`)."""
        self.waiting.paused(as_tokens(tokens), kind_of(kind), lossy=lossy, expect=expect)

    def resume(self, tokens: Sequence[int] | Tokens) -> None:
        """The next request of the context is about to be made; `complete` says so by itself."""
        self.waiting.begun(as_tokens(tokens))

    def hint(self, tokens: Sequence[int] | Tokens, name: str, *, until: float | None = None) -> bool:
        """Take a hint on a context, see `Waiting.hint`. Raises ConfigError for an unknown one."""
        return self.waiting.hint(as_tokens(tokens), name, until=until)

    def supersede(self, tokens: Sequence[int] | Tokens, keep: int) -> int:
        """Drop the KV of ``tokens`` after the first ``keep`` that no other context shares; returns how many blocks."""
        ids, size = as_tokens(tokens), self.engine.space.block_tokens
        self.pool.let_go(ids, beyond=keep)
        if self.store is None:
            return 0
        keys = self.keys(ids)
        kept = keys[: -(-max(keep, 0) // size)]
        self.store.flush()
        self.store.pin(kept)
        try:
            return self.store.forget(keys)
        finally:
            self.store.unpin(kept)

    def close(self) -> None:
        """Let go of the contexts in memory. The store belongs to whoever opened it."""
        if self.homing is not None:
            self.homing.close()
        self.storing.close()
        self.pool.clear()

    def calibrate(self) -> None:
        """Teach the model of cost, if there is one, what prefills take: by some short ones, whose contexts are dropped.

        About a second for a small model on a small machine; without it the first requests teach it.
        """
        if self.cost is None:
            return
        space = self.engine.space
        for count in (16, 64, 256, 16):
            ids = (np.arange(min(count, space.max_tokens)) % space.vocab_size).astype("<i4")
            with self.compute:
                live, at = self.engine.start(len(ids)), self.clock()
                self.engine.prefill(live, ids)
                self.cost.prefill.observe(len(ids), 0, self.clock() - at)

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

    def stored(self, store: WholeStore, keys: Sequence[bytes], lossy: str | None = None) -> int:
        """Leading tokens of the blocks of ``keys`` from which this engine can go on, as far as the store knows."""
        held = store.match(keys, lossy)
        return held.state_tokens if self.engine.space.needs_state else held.tokens

    def _ask(self, remote: Remote, ids: Tokens, lossy: str | None) -> Fetching | None:
        """Have other nodes asked for what lacks here; nothing of it needs the engine, so other requests may compute."""
        assert self.cost is not None
        stored = 0
        if self.store is not None:
            with suppress(StoreError):
                usable = self.keys(ids)[: (len(ids) - 1) // self.engine.space.block_tokens]
                stored = self.stored(self.store, usable, lossy)
        held = self.pool.match(self.engine, ids, stored, lossy)
        return ask(self.engine, remote, self.cost, ids, held, self.clock, self._rng, lossy=lossy)


def _unknown(_: bytes) -> None:
    return None
