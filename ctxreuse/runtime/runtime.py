"""One engine, one store, one tenant: prompts in, logits or answers out, KV reused and kept on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from random import SystemRandom
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ctxreuse.block.levels import allowed_by, check_limit
from ctxreuse.constrain import GrammarCompiler
from ctxreuse.cost import CostModel
from ctxreuse.engines.base import DeviceMemoryEngine
from ctxreuse.engines.chunks import ChunkEngine
from ctxreuse.engines.prompt import rewrites_history
from ctxreuse.engines.remembered import text_memory
from ctxreuse.engines.scoring import TokenScores, score_tokens
from ctxreuse.errors import ConfigError, EngineDiedError, EngineError, StoreError
from ctxreuse.identity.keys import ROOT, Tokens, as_tokens, giver_id, tenant_salt
from ctxreuse.judge import StepRule
from ctxreuse.pauses import kind_of
from ctxreuse.planner import CachedPrefixes, Part, Permutation, Plan, Planner
from ctxreuse.reuse import MaxSeconds
from ctxreuse.runtime.answers import AnswerGroup
from ctxreuse.runtime.checkpoints import StateCheckpoints
from ctxreuse.runtime.chunks.backfill import ChunkBackfill
from ctxreuse.runtime.chunks.reuse import ChunkReuse
from ctxreuse.runtime.compress import ContextCompressor
from ctxreuse.runtime.context_cache import ContextCache
from ctxreuse.runtime.draft_model import DraftModel
from ctxreuse.runtime.drafting import Drafting
from ctxreuse.runtime.elsewhere import Verifying
from ctxreuse.runtime.erase import Eraser
from ctxreuse.runtime.exiting import Exiting
from ctxreuse.runtime.fetch.fetch import Fetcher, PromptFetch
from ctxreuse.runtime.inflight.memory import MemoryAdmission
from ctxreuse.runtime.inflight.sharing import PromptInFlight, PromptsInFlight
from ctxreuse.runtime.options import RuntimeOptions
from ctxreuse.runtime.partial_blocks import PartialBlocks
from ctxreuse.runtime.paused import PausedContexts
from ctxreuse.runtime.prefill import PrefillWork, PromptPrefiller
from ctxreuse.runtime.request import PrefillResult, PromptLike, Request, more_keys, validate_tokens
from ctxreuse.runtime.stepped import SteppedAnswer
from ctxreuse.runtime.steps.order import RequestCancelledError
from ctxreuse.runtime.steps.scheduler import StepScheduler
from ctxreuse.runtime.verified import VerifiedAnswer, refusal
from ctxreuse.runtime.watch import watch_runtime
from ctxreuse.runtime.writeback import Writeback
from ctxreuse.speculate import remove_draft_files
from ctxreuse.why import RequestInfo, RequestLog, Why, explain

if TYPE_CHECKING:
    from ctxreuse.bus.remote import Remote, Verifier
    from ctxreuse.constrain import Constraint, Grammar
    from ctxreuse.engines.base import Engine
    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.engines.text import TextModel
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.pauses import PauseKind
    from ctxreuse.runtime.completion import Completion
    from ctxreuse.runtime.steps.order import RequestTurn
    from ctxreuse.store.base import Store
    from ctxreuse.usage import Usage
    from ctxreuse.why import OpenRequest

__all__ = ["Runtime"]

log = logging.getLogger(__name__)

_CALIBRATE = "To reuse documents in any order: `ctxreuse calibrate NAME --chunks`"
#: Every so many prompts the store's policy gets the present recompute cost.
_PRICED = 32
#: Tokens of a prompt that are scored between others' passes: their logits are 12 MB for a vocabulary of 50,000.
_SCORED = 64


def _available(engine: Engine, host: Callable[[], int]) -> int:
    """Bytes that contexts could be given now, where the engine keeps them."""
    own = engine.free_memory() if isinstance(engine, DeviceMemoryEngine) else None
    return host() if own is None else own


class Runtime:
    """Prefills and answers prompts. Any thread may call; those who compute at the same time share the engine's passes.

    Text is durable elsewhere; here KV is a cache. A miss, a corrupt block or a failing store costs a recompute, counted
    in ``Usage``, and never fails the request. Implements `RuntimeProtocol`, which has the docstrings.

    Args:
        engine: the engine.
        store: stores blocks (None: only in memory); the caller closes it.
        options: everything else, see `RuntimeOptions`.
    """

    def __init__(self, engine: Engine, store: Store | None = None, options: RuntimeOptions | None = None) -> None:
        options = options or RuntimeOptions()
        self.engine, self.store, self.options = engine, store, options
        self.space: ModelSpace = engine.space
        self.text: TextModel | None = options.text if options.text is not None else engine.text
        self.requests = options.requests if options.requests is not None else RequestLog()
        self.metrics, self.recorder, self.clock = options.metrics, options.recorder, options.clock
        learns = options.remote is not None or isinstance(options.recompute, MaxSeconds)
        self.cost = CostModel() if options.cost is None and learns else options.cost
        self.steps = StepScheduler(engine, stall=options.stall, clock=self.clock)
        self.inflight = PromptsInFlight(engine, self.steps.exclusive)
        stop_ids = self.text.stop_ids if self.text is not None else frozenset[int]()
        self.grammars = GrammarCompiler(self.text, engine.space.vocab_size, stop_ids)
        self._salt = tenant_salt(options.tenant)
        self._prompts = 0
        self.planner = Planner()

        self.chunk_backfill: ChunkBackfill | None = None
        if store is not None and isinstance(engine, ChunkEngine):
            self.chunk_backfill = ChunkBackfill(store, engine.space, self._salt)
        self.chunk_reuse = ChunkReuse(engine, self._salt, options, self.cost, self.chunk_backfill)
        compressor = ContextCompressor(engine, lambda: self.chunk_reuse.gate)
        self.context_cache = ContextCache(options.context_cache_bytes, compressor)
        self.admission: MemoryAdmission | None = None
        if options.available_memory is not None:
            available = partial(_available, engine, options.available_memory)
            self.admission = MemoryAdmission(self.inflight, self.context_cache, available, self.clock)
        self.paused = PausedContexts(self.context_cache, store, self.clock, self._record_pause)
        rewrites = engine.space.needs_state and self.text is not None and rewrites_history(self.text)
        self.checkpoints = StateCheckpoints(engine.space, options.states, rewrites_history=rewrites)
        partials = None if engine.space.needs_state else PartialBlocks(engine, self._salt)
        self.writeback = Writeback(engine, store, self.checkpoints, self.chunk_backfill, partials, self._salt)
        self._prefiller = PromptPrefiller(
            engine,
            store,
            self.context_cache,
            self.checkpoints,
            partials,
            self.chunk_reuse,
            self.cost,
            self.steps,
            self.clock,
        )
        self.verifying: Verifying | None = None
        self.drafting: Drafting | None = None
        draft = None if options.draft is None else DraftModel(options.draft, engine, self.text, self.clock)
        if options.speculate == "auto" or options.verify:
            self.drafting = Drafting(
                engine.space,
                self._salt,
                self.steps.costs,
                lambda ids, keys: more_keys(engine.space, self._salt, ids, keys),
                folder=options.drafts,
                metrics=self.metrics,
                here=options.speculate == "auto",
                model=draft,
                stops=stop_ids,
            )
            self.drafting.try_out(engine, self.text)
        self.exiting = Exiting(
            engine, self._salt, self.steps, budget=options.exits, folder=options.drafts, metrics=self.metrics
        )
        self._fetcher: Fetcher | None = None
        self.eraser = Eraser(store, self.requests, self.forget_texts, self.paused, engine.space, self._salt)
        self.connect(options.remote)
        if self.metrics is not None:
            watch_runtime(self.metrics, self.steps, self.inflight, self.admission, self.context_cache)
        if store is not None and engine.codec is not None:
            store.register_codec(engine.codec)

    def connect(self, remote: Remote | None) -> None:
        """Fetch from other nodes from now on (None: from none); a cost model must have been given, or a remote."""
        self._fetcher = None
        if remote is not None:
            assert self.cost is not None
            rng = self.options.rng if self.options.rng is not None else SystemRandom()
            self._fetcher = Fetcher(self.engine, remote, self.cost, self.clock, rng)

    def let_verify(self, verifier: Verifier | None, steps: StepRule | None = None, *, in_steps: bool = False) -> None:
        """Let other nodes decode answers from now on (None: none); `RuntimeOptions.verify` must be set. ``steps``: how
        those are written that are in steps: all with ``in_steps``, else where a request wants it."""
        self.verifying = None
        if verifier is not None:
            assert self.drafting is not None
            self.verifying = Verifying(verifier, self.drafting, steps or StepRule(), in_steps=in_steps)

    def keys(self, tokens: Sequence[int] | Tokens) -> list[bytes]:
        """Prefix keys of the whole blocks of ``tokens`` in this engine's space for this tenant."""
        return more_keys(self.space, self._salt, as_tokens(tokens), ())

    def check_max_kl(self, max_kl: float | None) -> None:
        """Raise ConfigError, saying what to do, if nothing here can tell which KV is within ``max_kl``: neither the
        engine's profile has a level that is, nor is there a chunk profile, which measures relocated KV."""
        if check_limit(max_kl) is None or self.chunk_reuse.gate.profile is not None:
            return
        codec = self.engine.codec
        if codec is None:
            raise ConfigError("this engine has no codec", fix=f"{_CALIBRATE}; or leave max_kl= out, for exact KV only")
        levels = [info.name for info in codec.levels if info.lossy]
        if not any(allowed_by(name, max_kl) for name in levels):
            have = f"the levels are {', '.join(levels)}" if levels else "the model has no calibration profile"
            fix = f"Run `ctxreuse calibrate`, allow more, or leave max_kl= out, for exact KV only; {_CALIBRATE}"
            raise ConfigError(f"nothing is known to be within max_kl={max_kl:g}: {have}", fix=fix)

    def request(
        self,
        tokens: Sequence[int] | Tokens,
        *,
        parts: Sequence[int] = (),
        branches: Sequence[int] = (),
        max_kl: float | None = None,
        about: RequestInfo | None = None,
        priority: int = 0,
        caller: str = "",
    ) -> Request:
        """See `RuntimeProtocol.request`."""
        ids = validate_tokens(self.space, tokens)
        self.check_max_kl(max_kl)
        inside = tuple(sorted({at for at in parts if 0 < at < len(ids)}))  # they may come from a client
        limit, about = check_limit(max_kl), about or RequestInfo()
        return Request(ids, self.keys(ids), inside, tuple(branches), limit, about, priority, caller)

    def plan(self, parts: Sequence[Part], max_kl: float | None = None) -> Plan:
        """See `RuntimeProtocol.plan`."""
        store, space = self.store, self.space
        anywhere = max_kl is not None and isinstance(self.engine, ChunkEngine)
        if store is None or (anywhere and self.chunk_reuse.gate.profile is not None):
            return Plan(Permutation.identity(len(parts)))
        cached = CachedPrefixes(
            lambda keys: store.match(keys, max_kl), space.digest, self._salt, space.block_tokens,
            states=space.needs_state,
        )  # fmt: skip
        try:
            return self.planner.plan(parts, cached)
        except StoreError as error:
            log.warning("documents stay as given: %s", error)
            return Plan(Permutation.identity(len(parts)))

    def _request(self, prompt: PromptLike) -> Request:
        return prompt if isinstance(prompt, Request) else self.request(prompt)

    # Requests

    def prefill(
        self,
        prompt: PromptLike,
        *,
        reserve: int = 0,
        forks: int = 0,
        turn: RequestTurn | None = None,
        log: bool = True,
    ) -> PrefillResult:
        """Bring a prompt into the engine's memory, reusing the longest cached prefix.

        The caller owns the result until `release`. At least the last token is computed, for its logits. A prefix that
        another request is computing is waited for, and copied. ``reserve``: room for this many further tokens;
        ``forks``: contexts that will be forked from it, with as much room each; ``turn``: the request's (None: a new
        one); ``log``: it is to be explained. Raises what `request` raises.
        """
        request = self._request(prompt)
        number = -1 if self.recorder is None else self.recorder.prompt(request.keys, len(request.ids))
        self._report_to_policy(request)
        turn = turn if turn is not None else self.turn(request)
        mine = PromptInFlight(self.inflight, request.keys, len(request.ids), request.max_kl, turn)
        try:
            done = self._prefill(request, turn, mine, reserve, forks)
        except BaseException as error:
            context = mine.withdraw()
            if context is not None and isinstance(error, RequestCancelledError):
                self.context_cache.put(context)  # it may be requested again
            mine.end()
            raise
        done.record.number = number
        if log:
            self._log_request(done)
        return done

    def _prefill(
        self, request: Request, turn: RequestTurn, mine: PromptInFlight, reserve: int, forks: int
    ) -> PrefillResult:
        size, began = self.space.block_tokens, self.clock()
        shared = mine.take(lambda: self._cached_tokens(request) // size)
        shared = shared._replace(seconds=self.clock() - began)
        if self.admission is not None:  # after waiting for another, which may wait for memory itself
            self.admission.enter(mine, turn, len(request.ids), reserve, forks)
        fetch = self._start_fetch(request, len(shared.views) * size)
        try:
            if fetch is not None:
                fetch.prepare()
            done = self._prefiller.run(PrefillWork(request, turn, mine, shared), reserve=reserve, fetch=fetch)
            if fetch is not None and fetch.tokens:
                refinements = fetch.refinements() if self.store is not None else None
                done.record.receive(fetch.views, refinements, giver_id(fetch.offer.peer.encode()))
        finally:
            if fetch is not None:
                fetch.close()
        return done

    def turn(self, request: Request) -> RequestTurn:
        """Return the turn of a request that comes now."""
        return self.steps.turn(priority=request.priority, tenant=request.caller, session=request.about.session)

    def complete(self, prompt: PromptLike, sampling: SamplingParams, *, was: PauseKind | None = None) -> Completion:
        """See `RuntimeProtocol.complete`."""
        return self.complete_many(prompt, [sampling], was=was)[0]

    def complete_many(
        self, prompt: PromptLike, samplings: Sequence[SamplingParams], *, was: PauseKind | None = None
    ) -> list[Completion]:
        """See `RuntimeProtocol.complete_many`."""
        if self.text is None:
            raise EngineError("this engine has no tokenizer", fix="Give Runtime a TextModel: RuntimeOptions(text=…)")
        constraints = [self.constrain(one.grammar) if one.grammar is not None else None for one in samplings]
        request, why_here = self._request(prompt), ""
        if self.verifying is not None:
            why_here = refusal(samplings)
            in_steps = samplings[0].verify == "steps" or self.verifying.in_steps
            if not why_here and in_steps:
                why_here = "state" if self.space.needs_state else ""
                if not why_here:
                    written = SteppedAnswer(self, self.text, request, samplings[0], was, self.verifying)
                    return [written.completion()]
            if not why_here:
                answer = VerifiedAnswer(self, self.text, request, samplings[0], was, self.verifying)
                return [answer.completion()]
        return AnswerGroup(self, self.text, request, samplings, was, constraints, why_here).completions()

    def constrain(self, grammar: Grammar) -> Constraint:
        """Compile a grammar, or find it compiled. Raises what `GrammarCompiler.compile` raises."""
        return self.grammars.compile(grammar)

    def score(self, prompt: PromptLike, top: int = 0, check: Callable[[], None] = lambda: None) -> TokenScores:
        """Return how likely the model finds each token of a prompt but the first, after those before it.

        All of the prompt is computed, as what is kept of it has no logits; others' passes go between its parts.
        ``top``: so many of the likeliest tokens in each place; ``check`` is called before each part, and may raise.
        Raises what `request` and `Engine.prefill` raise.
        """
        ids = self._request(prompt).ids
        context, found = self.engine.new_context(len(ids)), list[TokenScores]()
        for start in range(0, len(ids) - 1, _SCORED):
            part = ids[start : min(start + _SCORED, len(ids) - 1)]
            check()
            with self.steps.exclusive():
                found.append(score_tokens(self.engine, context, part, ids[start + 1 :][: len(part)], top))
        self.context_cache.put(context)
        return TokenScores.joined(found)

    def warm(self, prompt: PromptLike) -> Usage:
        """See `RuntimeProtocol.warm`."""
        done = self.prefill(prompt)
        self.release(done)
        return done.usage

    def release(self, done: PrefillResult) -> list[bytes]:
        """Take a finished context back: store its new blocks and states, and keep it in the context cache.

        Returns the keys of all its whole blocks.
        """
        context, record = done.context, done.record
        if record.in_flight is not None:
            record.in_flight.withdraw()
        try:
            keys = more_keys(self.space, self._salt, context.tokens, record.request.keys)
            offered = self.writeback.keep(context, record, keys)
            self.writeback.index(context, record, offered)
            if record.logged is not None:
                self.requests.kept(record.logged, context.tokens, offered)
            self.context_cache.put(context, record.request.max_kl)
        except EngineDiedError as error:
            log.warning("an answer's KV was not stored: %s", error)  # the answer is whole
        finally:
            self.drop(done)
        return keys

    def drop(self, done: PrefillResult) -> None:
        """Nothing more comes of a context, for those who wait for its blocks."""
        if done.record.in_flight is not None:
            done.record.in_flight.withdraw()
            done.record.in_flight.end()

    def _record_pause(self, keys: Sequence[bytes], label: int) -> None:
        if self.recorder is not None:
            self.recorder.mark(keys, label)

    def _report_to_policy(self, request: Request) -> None:
        """Report the prompt to the eviction policy; every 32nd time also update its recompute cost."""
        if self.store is None:
            return
        self.store.on_lookup(request.keys, self.space.block_tokens)
        self._prompts += 1
        line = self.cost.prefill.coefficients if self.cost is not None and self._prompts % _PRICED == 1 else None
        if line is not None:
            self.store.set_recompute_cost(line[1], line[2])

    def _start_fetch(self, request: Request, shared: int) -> PromptFetch | None:
        """Ask other nodes for missing blocks. This does not need the engine, so other requests may compute.

        ``shared``: leading tokens that came from another request.
        """
        return self._fetcher.start(request, max(shared, self._cached_tokens(request))) if self._fetcher else None

    def _cached_tokens(self, request: Request) -> int:
        """Return how many leading tokens of a prompt memory and store have."""
        stored = 0
        if self.store is not None:
            with suppress(StoreError):
                whole = (len(request.ids) - 1) // self.space.block_tokens
                stored = self.resumable_tokens(self.store, request.keys[:whole], request.max_kl)
        return self.context_cache.match(self.engine, request.ids, stored, request.max_kl)

    def resumable_tokens(self, store: Store, keys: Sequence[bytes], max_kl: float | None = None) -> int:
        """Return how many leading tokens of the stored blocks among ``keys`` this engine can continue from."""
        found = store.match(keys, max_kl)
        return found.state_tokens if self.space.needs_state else found.tokens

    def _log_request(self, done: PrefillResult) -> None:
        record, removal = done.record, self.store.removal if self.store is not None else _nothing
        record.logged = logged = self.requests.note(
            record.request, done.usage, done.computed, space=self.space, salt=self._salt, removal=removal
        )
        done.usage = msgspec.structs.replace(done.usage, request=logged.entry.request, why=logged.entry.why)
        if record.gate_outcome and self.metrics is not None:
            self.metrics.add("ctxreuse_chunk_reuse_requests_total", 1, record.gate_outcome)

    def log_elsewhere(self, request: Request, usage: Usage) -> OpenRequest:
        """Log a request whose prompt another node computes."""
        return self.requests.note(request, usage, (), space=self.space, salt=self._salt, removal=_nothing)

    def why(self, request: str = "", *, session: str = "", others: bool = False) -> Why:
        """See `RuntimeProtocol.why`; only requests of this runtime's tenant are explained."""
        return explain(
            self.requests,
            request,
            session=session,
            tenant=self.requests.tenant(self._salt),
            decode=self.text.decode if self.text is not None else None,
            others=others,
            emptied=self.store.removal(ROOT) if self.store is not None else None,
        )

    # Contexts between requests

    def forget(self, tokens: Sequence[int] | Tokens) -> int:
        """See `RuntimeProtocol.forget`."""
        ids = as_tokens(tokens)
        self.context_cache.drop(ids)
        self.requests.forget(ids)
        self.forget_drafts()
        if self.store is None:
            return 0
        self.store.flush()
        return self.store.forget(self.keys(ids))

    def erase(self, tokens: Sequence[int] | Tokens, *, session: str = "", keep: Iterable[Tokens] = ()) -> int:
        """See `RuntimeProtocol.erase`."""
        return self.eraser.carry_out(self.eraser.plan_context(as_tokens(tokens), session, keep))

    def supersede(self, tokens: Sequence[int] | Tokens, keep: int) -> int:
        """See `RuntimeProtocol.supersede`."""
        ids, size = as_tokens(tokens), self.space.block_tokens
        self.context_cache.release(ids, beyond=keep)
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

    def forget_texts(self) -> None:
        """Let memory hold no context and no draft of a text that was deleted: all go, as they are cheap to bring
        back."""
        self.context_cache.clear()
        self.forget_drafts()

    def forget_drafts(self, before: float = inf) -> None:
        """Forget all texts that answers are drafted from, on disk too, if one is from before a time (seconds since
        1970), and all that were encoded."""
        if self.engine.text is not None:
            text_memory(self.engine.text).forget()
        if self.drafting is not None:
            self.drafting.forget(before)
        if self.options.drafts is not None:
            remove_draft_files(self.options.drafts, before)

    def save_drafts(self, seconds: float = 0.0) -> None:
        """Keep on disk what drafts are made from, and what was learnt of early exits, but not twice within so many
        seconds."""
        self.exiting.save()
        if self.drafting is not None:
            self.drafting.save(seconds)

    def forget_requests(self, session: str | None = None) -> None:
        """See `RuntimeProtocol.forget_requests`."""
        self.forget_drafts()
        if session is None:
            self.requests.forget_texts()
        else:
            self.requests.forget_session(session)

    def pause(
        self, tokens: Sequence[int] | Tokens, kind: str, *, expect: float | None = None, max_kl: float | None = None
    ) -> None:
        """See `RuntimeProtocol.pause`."""
        ids = as_tokens(tokens)
        self.paused.on_pause(ids, self.keys(ids), kind_of(kind), max_kl=max_kl, expect=expect)

    def resume(self, tokens: Sequence[int] | Tokens) -> None:
        """See `RuntimeProtocol.resume`."""
        ids = as_tokens(tokens)
        self.paused.on_request(ids, self.keys(ids))

    def hint(self, tokens: Sequence[int] | Tokens, name: str, *, until: float | None = None) -> bool:
        """See `RuntimeProtocol.hint`."""
        return self.paused.hint(self.keys(tokens), name, until=until)

    def calibrate(self) -> None:
        """Let the cost model, if there is one, learn from some short prefills, whose contexts are dropped.

        Takes about a second for a small model; without it the model learns from the first requests.
        """
        if self.cost is None:
            return
        for count in (16, 64, 256, 16):
            ids = (np.arange(min(count, self.space.max_tokens)) % self.space.vocab_size).astype("<i4")
            _, seconds = self.steps.advance(self.engine.new_context(len(ids)), ids)
            self.cost.prefill.observe(len(ids), 0, seconds)

    def close(self) -> None:
        """Release the contexts in memory. The caller closes the store."""
        if self.chunk_backfill is not None:
            self.chunk_backfill.close()
        self.writeback.close()
        self.context_cache.clear()
        self.save_drafts()
        self.exiting.save(clean=True)


def _nothing(_: bytes) -> None:
    return None
