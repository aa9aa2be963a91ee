"""One prompt on its way into the engine: what memory, the store and another node hold of it, and computing the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ctxreuse.cost import CostModel, Record, Way
from ctxreuse.engines.provenance import leading, tokens_at
from ctxreuse.errors import StoreError
from ctxreuse.keys import Tokens
from ctxreuse.levels import fits, short
from ctxreuse.runtime.advance import advance
from ctxreuse.runtime.fetching import FetchFailedError, Fetching
from ctxreuse.runtime.load import OVERLAP_TOKENS, SpoiledError, load_prefix
from ctxreuse.runtime.spans import Spans, together, within, without
from ctxreuse.runtime.usage import Lacking, Prefilled, Usage

if TYPE_CHECKING:
    from ctxreuse.engines.base import Live, Logits
    from ctxreuse.runtime.anywhere import Moving
    from ctxreuse.runtime.runtime import Runtime
    from ctxreuse.store.base import WholeStore

__all__ = ["Prompt"]


_ABSENT = "absent"


class Times(NamedTuple):
    """Readings of the clock: when the prompt had the engine, when this attempt began, when loading had ended; and the
    seconds waited for another node by then."""

    began: float
    started: float
    loaded: float
    waited: float


class Price(NamedTuple):
    """What the local way was: tokens that memory and store lacked, and the seconds predicted."""

    way: Way
    lacked: int
    predicted: float | None


class Prompt:
    """Used once, by the thread that holds the runtime's compute lock. ``fetching``: what another node sends, if any;
    ``lossy``: the worst level of KV that may be reused; ``parts``: where parts of it end."""

    def __init__(
        self,
        runtime: Runtime,
        ids: Tokens,
        reserve: int,
        branches: Sequence[int],
        fetching: Fetching | None,
        lossy: str | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        self._lossy = lossy
        # Whoever names them may be anybody.
        self._parts = sorted({at for at in parts if 0 < at < len(ids)})
        self._moving: Moving | None = None
        self._runtime, self._reserve, self._branches = runtime, reserve, branches
        self.ids = self._ids = ids
        self._fetching, self._clock = fetching, runtime.clock
        self._observe = True
        self._points: Sequence[int] = ()
        #: Of its whole blocks.
        self.keys = runtime.keys(ids)

    def bring(self) -> Prefilled:
        """The prompt in the engine's memory. Each failure leaves fewer ways to try: the last is computing all of it."""
        store, limit = self._runtime.store, len(self._ids)
        missed = "" if store is not None else "no store"
        began = self._clock()
        while True:
            try:
                return self._bring(store, limit, missed, began)
            except SpoiledError as spoiled:
                limit, missed = spoiled.usable, spoiled.reason
            except FetchFailedError as failed:
                missed = failed.reason
            except StoreError:
                store, missed = None, "unreadable"

    def _bring(self, store: WholeStore | None, limit: int, missed: str, began: float) -> Prefilled:
        runtime, ids, cost = self._runtime, self._ids, self._runtime.cost
        engine, space = runtime.engine, runtime.engine.space
        size = space.block_tokens
        usable = self.keys[: min(limit, (len(ids) - 1) // size)]
        started = loaded = self._clock()
        waited = self._fetching.waited if self._fetching is not None else 0.0
        keeping = runtime.keeping
        stored = most = 0
        if store is not None:
            stored, most = keeping.resume(store, usable, len(ids), cost, self._lossy)
        if stored < most:
            missed = missed or "slow"
        self._points = keeping.points(store, self.keys, self._lossy)
        self._moving = moving = runtime.anywhere.begin(store, ids, self._parts, self._lossy, cost, self._clock)

        taken = runtime.pool.take(engine, ids, stored, self._lossy)
        self._observe = True
        if taken is not None:
            live, reused = taken
            price = self._price("recompute", reused, 0)
            logits, sources = self._finish(live), {"device": reused}
            missed = missed or (_ABSENT if len(ids) - reused > size else "")
        else:
            reused = 0
            live = engine.start(len(ids) + self._reserve)
            price = self._price("load" if stored else "recompute", stored, keeping.nbytes(stored))
            missed = missed or self._lacking(store, usable[stored // size :])
            if store is not None and stored:
                overlap = self._fetching is None and len(ids) - stored <= OVERLAP_TOKENS
                # Chunks are read from the store too, which one thread can do once at a time.
                overlap = overlap and not (moving is not None and moving.look(stored))
                self._observe = not overlap
                keys = usable[: stored // size]
                done = load_prefix(
                    engine, store, live, ids, keys, self._finish, self._clock, overlap=overlap, lossy=self._lossy
                )
                loaded, sources, logits = done.at, done.sources, done.logits
                missed = missed or done.missed
                if cost is not None and not overlap:
                    cost.disk.observe(keeping.nbytes(sum(sources.values())), loaded - started)
            else:
                logits, sources = self._finish(live), {}
        result = self._result(live, logits, sources, missed, Times(began, started, loaded, waited), price)
        runtime.storing.note(live, self._parts, reused, [(one.start, one.end) for one in result.computed])
        return result

    def _lacking(self, store: WholeStore | None, keys: Sequence[bytes]) -> str:
        """Why the first of the blocks ``keys`` cannot be loaded; "" if there are none."""
        held = store.entries(keys[:1])[0] if store is not None and keys else None
        if not keys or held is None:
            return _ABSENT if keys else ""
        if not fits(held.level, self._lossy):
            return "level"
        return "state" if self._runtime.engine.space.needs_state else _ABSENT

    def _price(self, way: Way, held: int, nbytes: int) -> Price:
        """Before the work: what comes of it teaches the cost model."""
        lacked, cost = len(self._ids) - held, self._runtime.cost
        return Price(way, lacked, None if cost is None else cost.local(nbytes, lacked, held))

    def _finish(self, live: Live) -> Logits:
        if self._fetching is None:
            return self._compute(live, len(self._ids))
        return self._fetching.finish(live, self._compute)

    def _compute(self, live: Live, stop: int, *, observe: bool = True) -> Logits:
        runtime, start, at = self._runtime, live.n, self._clock()
        moving, fetching = self._moving, self._fetching
        if moving is not None and self._observe and stop == len(self._ids) and moving.look(start):
            if not observe and fetching is not None and fetching.loading is not None:
                fetching.loading.wait()  # the store is not to be read for as long as a link may take
            moved = moving.finish(live)
            if moved is not None:
                return moved
        stops = runtime.keeping.stops(live, self._points, self._branches)
        logits = advance(runtime.engine, live, self._ids[start:stop], stops)
        if runtime.cost is not None and observe and self._observe:
            runtime.cost.prefill.observe(stop - start, start, self._clock() - at)
        return logits

    def _result(
        self, live: Live, logits: Logits, sources: dict[str, int], missed: str, times: Times, price: Price
    ) -> Prefilled:
        now, fetching, moving, ids = self._clock(), self._fetching, self._moving, self._ids
        waited = 0.0
        here: Spans = ((0, sum(sources.values())),)
        if fetching is not None:
            waited = fetching.waited - times.waited
            if fetching.tokens:
                # A context of ours may have been cut back to the boundary where the fetched blocks begin.
                front = fetching.end - fetching.tokens
                local = {name: min(n, front) for name, n in sources.items()}
                here = ((0, sum(local.values())), (front, fetching.end))
                sources = {**local, fetching.offer.source: fetching.tokens}
            size = self._runtime.engine.space.block_tokens
            whole = sum(sources.values()) >= (len(ids) - 1) // size * size
            missed = "" if whole else fetching.missed or missed or _ABSENT
        if moving is not None and moving.spans:
            here = together((*here, *moving.spans))
            sources = dict(Counter(sources) + Counter(moving.sources))
        computed = self._computed(without(((0, len(ids)),), here))
        usage = Usage(
            len(ids),
            sum(sources.values()),
            sources,
            self._why(missed, computed),
            times.loaded - times.started,
            now - times.loaded - waited,
            seconds_fetch=fetching.waited if fetching is not None else 0.0,
            fetched_bytes=fetching.received if fetching is not None else 0,
            by_level=_levels(live, here),
            approx=leading(live.levels, None) < live.n,
            moved=moving.moved if moving is not None else 0,
            mended=moving.mended if moving is not None else 0,
            gate=moving.said if moving is not None else "",
        )
        if moving is not None and moving.word and self._runtime.metrics is not None:
            self._runtime.metrics.add("ctxreuse_gated_requests_total", 1, moving.word)
        if self._runtime.cost is not None and not usage.moved:
            self._record(self._runtime.cost, price, now - times.began)
        return Prefilled(live, logits, usage, computed)

    def _computed(self, spans: Spans) -> list[Lacking]:
        """The spans with what is known of why they were computed, cut where that changes."""
        found: list[Lacking] = []
        rest = spans
        for reason, chunks in (self._moving.reasons if self._moving is not None else {}).items():
            found += [Lacking(start, end, reason) for start, end in within(spans, chunks)]
            rest = without(rest, chunks)
        return sorted([*found, *(Lacking(start, end) for start, end in rest)])

    def _why(self, missed: str, computed: Sequence[Lacking]) -> str:
        """What to say of the first whole block that had to be computed; ``missed`` is true of the first that was not in
        its place."""
        if self._moving is None or not self._moving.said:
            return missed
        size = self._runtime.engine.space.block_tokens
        last = (len(self._ids) - 1) // size
        for start, end, reason in computed:
            if start // size < min(last, end // size):
                return reason or missed
        return ""

    def _record(self, cost: CostModel, price: Price, seconds: float) -> None:
        fetching = self._fetching
        if fetching is None:
            cost.log.add(Record(price.way, price.way, price.lacked, price.predicted, seconds))
            return
        decision, took = fetching.decision, fetching.way if fetching.tokens else "recompute"
        real = fetching.prepared + seconds
        cost.log.add(Record(decision.way, took, price.lacked, decision.predicted, real, fetching.offer.peer))


def _levels(live: Live, spans: Spans) -> dict[str, int]:
    """Reused tokens by level, where ``spans`` are those that were not computed now."""
    found: dict[str, int] = {}
    for start, end in spans:
        for level, tokens in tokens_at(live.levels, start, end).items():
            found[short(level)] = found.get(short(level), 0) + tokens
    return found
