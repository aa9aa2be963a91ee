"""Prefills prompts: reuses what memory, store and another node have of each, computes the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ctxreuse.block.levels import allowed_by, family
from ctxreuse.cost import DecisionRecord, Way
from ctxreuse.engines.provenance import leading, tokens_at
from ctxreuse.errors import CtxReuseError, EngineDiedError, StoreError
from ctxreuse.runtime.fetch.fetch import FetchFailedError
from ctxreuse.runtime.load import OVERLAP_TOKENS, SpoiledError, load_prefix
from ctxreuse.runtime.request import ContextRecord, PrefillResult, Request
from ctxreuse.runtime.spans import Spans, difference, intersection, union
from ctxreuse.usage import TokenUsage, Usage, UsageSeconds
from ctxreuse.why import MissSpan

if TYPE_CHECKING:
    from ctxreuse.cost import CostModel
    from ctxreuse.engines.base import Context, Engine, Logits
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.runtime.checkpoints import StateCheckpoints
    from ctxreuse.runtime.chunks.reuse import ChunkReuse, ChunkReuseAttempt
    from ctxreuse.runtime.context_cache import ContextCache
    from ctxreuse.runtime.fetch.fetch import PromptFetch
    from ctxreuse.runtime.inflight.sharing import PromptInFlight, SharedPrefix
    from ctxreuse.runtime.partial_blocks import PartialBlocks
    from ctxreuse.runtime.steps.order import RequestTurn
    from ctxreuse.runtime.steps.scheduler import StepScheduler
    from ctxreuse.store.base import Store

__all__ = ["PrefillWork", "PromptPrefiller"]

_ABSENT = "absent"


class _Times(NamedTuple):
    """Readings of the clock: when the prompt had the engine, when this attempt began, when loading had ended; and the
    seconds waited for another node by then."""

    began: float
    started: float
    loaded: float
    waited: float


class _Price(NamedTuple):
    """The local way: tokens that memory and store lacked, and the seconds predicted."""

    way: Way
    missing: int
    predicted: float | None


class PrefillWork(NamedTuple):
    """A request, its turn, its prompt as others see it, and what it has of another's."""

    request: Request
    turn: RequestTurn
    mine: PromptInFlight
    shared: SharedPrefix


@dataclass(frozen=True)
class PromptPrefiller:
    """Prefills for one runtime. Any thread may call."""

    engine: Engine
    store: Store | None
    cache: ContextCache
    checkpoints: StateCheckpoints
    partials: PartialBlocks | None
    chunks: ChunkReuse
    cost: CostModel | None
    steps: StepScheduler
    clock: Callable[[], float]

    def run(self, work: PrefillWork, *, reserve: int = 0, fetch: PromptFetch | None = None) -> PrefillResult:
        """Bring the prompt into memory, with room for ``reserve`` further tokens.

        ``fetch``: what another node sends. Each failure leaves fewer ways to try; the last is computing everything. If
        the engine's process dies, the prompt is tried once more in the next one; it may be what kills it.
        """
        request = work.request
        store, usable = self.store, (len(request.ids) - 1) // self.engine.space.block_tokens
        missed = "" if store is not None else "no store"
        began, died = self.clock(), False
        while True:
            try:
                return _Attempt(self, work, store, fetch, missed).run(usable, reserve, began)
            except SpoiledError as spoiled:
                usable, missed = min(usable, spoiled.usable), spoiled.reason
            except FetchFailedError as failed:
                missed = failed.reason
            except StoreError:
                store, missed = None, "unreadable"
            except EngineDiedError:
                if died:
                    raise
                died, fetch = True, None
            work.mine.withdraw()


class _Attempt:
    """One attempt at a prompt. ``missed``: why the first block that is not in its place is not, as far as known."""

    def __init__(
        self, of: PromptPrefiller, work: PrefillWork, store: Store | None, fetch: PromptFetch | None, missed: str
    ) -> None:
        self._of, self._store, self._fetch, self._missed = of, store, fetch, missed
        self._request, self._turn, self._mine, self._shared = work
        request = work.request
        self._ids, self._size = request.ids, of.engine.space.block_tokens
        self._record = ContextRecord(request, in_flight=work.mine)
        self._chunks: ChunkReuseAttempt | None = None
        #: False while something else than computing takes the time.
        self._observe = True

    def run(self, usable: int, reserve: int, began: float) -> PrefillResult:
        """See `PromptPrefiller.run`; of the blocks the first ``usable`` may be loaded."""
        of, request, ids, store = self._of, self._request, self._ids, self._store
        keys = request.keys[:usable]
        started = loaded = of.clock()
        waited = self._fetch.waited if self._fetch is not None else 0.0
        stored = most = 0
        if store is not None:
            stored, most = of.checkpoints.resume(store, keys, len(ids), of.cost, request.max_kl)
        if stored < most:
            self._missed = self._missed or "slow"
        self._record.cut_points = of.checkpoints.points(store, request.keys, request)
        self._chunks = chunks = of.chunks.begin(store, request)

        taken = of.cache.take(of.engine, ids, max(stored, len(self._shared.views) * self._size), request.max_kl)
        if taken is None:
            taken = self._load_shared(stored, len(ids) + reserve)
            loaded = of.clock()
        else:
            self._record.indexed = taken[1]
        if taken is not None:
            context, reused = taken
            self._publish(context)
            price = self._price("recompute", reused, 0)
            logits, sources = self._finish(context), {"device": reused}
            self._missed = self._missed or (_ABSENT if len(ids) - reused > self._size else "")
        else:
            context = of.engine.new_context(len(ids) + reserve)
            price = self._price("load" if stored else "recompute", stored, of.checkpoints.nbytes(stored))
            self._missed = self._missed or self._why_not(keys[stored // self._size :])
            if store is not None and stored:
                # What is fetched follows at the end of a block. Chunks are read from the store too, which one thread
                # can do once at a time.
                alone = self._fetch is None and not (chunks is not None and chunks.look(stored))
                overlap = alone and len(ids) - stored <= OVERLAP_TOKENS
                self._observe = not overlap
                blocks, meanwhile = stored // self._size, self._finish if overlap else None
                partials = of.partials if alone else None
                done = load_prefix(of.engine, store, context, request, blocks, partials, meanwhile)
                self._missed, sources = self._missed or done.missed, done.sources
                self._record.partial = done.partial
                loaded = loaded if done.logits is not None else of.clock()
                self._publish(context)
                logits = done.logits if done.logits is not None else self._finish(context)
                if of.cost is not None and not overlap:
                    of.cost.disk.observe(of.checkpoints.nbytes(sum(sources.values())), loaded - started)
            else:
                logits, sources = self._finish(context), {}
        return self._result(context, logits, sources, _Times(began, started, loaded, waited), price)

    def _load_shared(self, stored: int, reserve: int) -> tuple[Context, int] | None:
        """Return a context with the blocks of another request, unless the store has more; as many it need not read."""
        views, state, _ = self._shared
        if not views or len(views) * self._size < stored:
            return None
        context = self._of.engine.new_context(reserve)
        try:
            self._of.engine.load(context, views, state).wait()
        except CtxReuseError:  # such as a memory fault; they can be computed
            return None
        return context, context.n

    def _publish(self, context: Context) -> None:
        """Let others take what is in ``context``, unless some of it may turn out to be wrong."""
        if self._fetch is None and self._observe:
            self._mine.publish(context)

    def _why_not(self, keys: Sequence[bytes]) -> str:
        """Why the first of the blocks ``keys`` cannot be loaded; "" if there are none."""
        entry = self._store.entries(keys[:1])[0] if self._store is not None and keys else None
        if not keys or entry is None:
            return _ABSENT if keys else ""
        if not allowed_by(entry.level, self._request.max_kl):
            return "level"
        return "state" if self._of.engine.space.needs_state else _ABSENT

    def _price(self, way: Way, cached: int, nbytes: int) -> _Price:
        """Before the work: its outcome teaches the cost model."""
        missing, cost = len(self._ids) - cached, self._of.cost
        return _Price(way, missing, None if cost is None else cost.local(nbytes, missing, cached))

    def _finish(self, context: Context) -> Logits:
        if self._fetch is None:
            return self._compute(context, len(self._ids))
        return self._fetch.finish(context, self._compute)

    def _compute(self, context: Context, stop: int, *, observe: bool = True) -> Logits:
        of, start = self._of, context.n
        chunks, fetch = self._chunks, self._fetch
        if chunks is not None and self._observe and stop == len(self._ids) and chunks.look(start):
            if not observe and fetch is not None and fetch.loading is not None:
                fetch.loading.wait()  # the store is not to be read for as long as a link may take
            with of.steps.exclusive():
                logits = chunks.finish(context)
            if logits is not None:
                return logits
        cuts = of.checkpoints.cuts(context, self._record.cut_points, self._request.branches)
        logits, seconds = self._advance(context, self._ids[start:stop], cuts)
        if of.cost is not None and observe and self._observe:
            of.cost.prefill.observe(stop - start, start, seconds)
        return logits

    def _advance(self, context: Context, tokens: Tokens, cuts: Sequence[int]) -> tuple[Logits, float]:
        """Append ``tokens`` to ``context``; returns the logits after the last one, and the seconds of the passes.

        A model with states can be resumed only where they were taken, and the engine takes them at the last block
        boundary of each run. So the run is cut at each of ``cuts`` (positions in the context) that has a boundary of
        its own, and where another request waits for the blocks before it.
        """
        space, seconds = self._of.engine.space, 0.0
        start, end, size = context.n, context.n + len(tokens), space.block_tokens
        while True:
            stop = end
            if space.needs_state:
                ahead = {at for at in {*cuts, *self._mine.cuts()} if at < end and at // size > context.n // size}
                stop = min(ahead, default=end)
            done = self._of.steps.step(context, tokens[context.n - start : stop - start], self._turn)
            seconds += done.seconds
            self._publish(context)
            if done.logits is not None and stop == end:
                return done.logits, seconds

    def _result(
        self, context: Context, logits: Logits, sources: dict[str, int], times: _Times, price: _Price
    ) -> PrefillResult:
        now, fetch, chunks, ids = self._of.clock(), self._fetch, self._chunks, self._ids
        self._mine.publish(context)
        missed, waited = self._missed, 0.0
        reused: Spans = ((0, sum(sources.values())),)
        if fetch is not None:
            waited = fetch.waited - times.waited
            if fetch.tokens:
                # A context of ours may have been cut back to the boundary where the fetched blocks begin.
                front = fetch.end - fetch.tokens
                local = {name: min(n, front) for name, n in sources.items()}
                reused = ((0, sum(local.values())), (front, fetch.end))
                sources = {**local, fetch.offer.source: fetch.tokens}
            whole = sum(sources.values()) >= (len(ids) - 1) // self._size * self._size
            missed = "" if whole else fetch.missed or missed or _ABSENT
        if chunks is not None and chunks.spans:
            reused = union((*reused, *chunks.spans))
            sources = dict(Counter(sources) + Counter(chunks.sources))
        computed = self._computed(difference(((0, len(ids)),), reused))
        self._record.computed = tuple((span.start, span.end) for span in computed)
        usage = Usage(
            TokenUsage(
                prompt=len(ids),
                cached=sum(sources.values()),
                by_source=sources,
                by_level=_levels(context, reused),
                relocated=chunks.relocated if chunks is not None else 0,
                recomputed=chunks.recomputed if chunks is not None else 0,
            ),
            UsageSeconds(
                times.loaded - times.started + self._shared.seconds,
                fetch.waited if fetch is not None else 0.0,
                now - times.loaded - waited,
            ),
            miss_reason=self._reason(missed, computed),
            gate_decision=chunks.decision if chunks is not None else "",
            approximate=leading(context.levels, None) < context.n,
            fetched_bytes=fetch.received if fetch is not None else 0,
        )
        if self._of.cost is not None and not usage.tokens.relocated:
            self._of.cost.log.add(self._decision(price, now - times.began))
        self._record.gate_outcome = chunks.outcome if chunks is not None else ""
        return PrefillResult(context, logits, usage, computed, self._record)

    def _computed(self, spans: Spans) -> list[MissSpan]:
        """The computed spans, cut where the reason changes that is known so far."""
        found: list[MissSpan] = []
        rest = spans
        for reason, chunks in (self._chunks.reasons if self._chunks is not None else {}).items():
            found += [MissSpan(start, end, reason) for start, end in intersection(spans, chunks)]
            rest = difference(rest, chunks)
        found += [MissSpan(start, end, "") for start, end in rest]
        return sorted(found, key=lambda span: span.start)

    def _reason(self, missed: str, computed: Sequence[MissSpan]) -> str:
        """Why the first computed whole block was computed; ``missed``: why the first block was not in its place."""
        if self._chunks is None or not self._chunks.decision:
            return missed
        last = (len(self._ids) - 1) // self._size
        for span in computed:
            if span.start // self._size < min(last, span.end // self._size):
                return span.reason or missed
        return ""

    def _decision(self, price: _Price, seconds: float) -> DecisionRecord:
        fetch = self._fetch
        if fetch is None:
            return DecisionRecord(price.way, price.way, price.missing, price.predicted, seconds)
        decision, took = fetch.decision, fetch.way if fetch.tokens else "recompute"
        real = fetch.prepared + seconds
        return DecisionRecord(decision.way, took, price.missing, decision.predicted, real, fetch.offer.peer)


def _levels(context: Context, spans: Spans) -> dict[str, int]:
    """Tokens of ``spans`` by family of level."""
    found: Counter[str] = Counter()
    for start, end in spans:
        for level, tokens in tokens_at(context.levels, start, end).items():
            found[family(level)] += tokens
    return dict(found)
