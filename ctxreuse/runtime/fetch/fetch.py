"""Fetches missing blocks of a prompt from another node, in the way predicted to be the fastest.

Two ways. ``layers``: all missing blocks are fetched layer by layer, and the rest of the prompt is computed behind them
as they come. ``tail``: blocks come from the end while the engine computes from the front; where both meet, the fetched
ones are loaded behind the computed ones (Jin et al., "Compute Or Load KV Cache? Why Not Both?", arXiv 2410.03065). The
second cannot be slower than computing, whatever the link does, but for its smaller steps near the meeting point.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from ctxreuse.block.levels import EXACT, allowed_by, expected_kl
from ctxreuse.bus.remote import FetchRequest, LevelRequest
from ctxreuse.cost import CostModel, Decision, FetchPath, Way
from ctxreuse.errors import ConfigError, FormatError, LinkDownError, LinkError
from ctxreuse.runtime.fetch.audit import first_k_matches, rows_match
from ctxreuse.runtime.fetch.watch import Expected, Watch

if TYPE_CHECKING:
    from ctxreuse.block.format import BlockView
    from ctxreuse.bus.remote import Fetch, Offer, Order, Remote
    from ctxreuse.cost import Decision, Level
    from ctxreuse.engines.base import Context, Engine, Loading, Logits
    from ctxreuse.runtime.request import Request

__all__ = ["FetchFailedError", "Fetcher", "LevelOptions", "PromptFetch", "level_request"]

log = logging.getLogger(__name__)

#: Tokens computed at a time while the ends are far apart: what engines put through the model together anyway, cut at
#: the same multiples, so that a fetch of which nothing comes costs nothing.
_STRIDE = 512
#: The first two steps behind a link that has never been measured: a whole stride took 1.1 of the 1.13 seconds that a
#: first contact over 1 Gbit/s needed, and shorter ones cost little where nothing comes.
_LOOK = 128
#: A step is long enough that its fixed cost stays below this share of it.
_OVERHEAD = 0.03
#: Seconds. If a peer's answer may take less than this, no peer is asked: it is about the shortest round trip.
_SHORTEST = 0.0005


#: Bytes of a block's head at most, in most models.
_HEAD = 4096


class LevelOptions(NamedTuple):
    """The levels at which a peer can send blocks of ``tokens`` tokens; at ``exact`` one has ``raw`` bytes."""

    levels: tuple[Level, ...]
    tokens: int
    raw: float

    @classmethod
    def of(cls, engine: Engine, offer: Offer, max_kl: float | None) -> LevelOptions:
        """Return the levels of an offer that ``max_kl`` allows and this engine can read."""
        space, codec = engine.space, engine.codec
        raw = offer.block_nbytes or space.token_nbytes * space.block_tokens
        levels: tuple[Level, ...] = ()
        if codec is not None:
            levels = tuple(one for one in offer.levels if allowed_by(one.name, max_kl) and codec.knows(one.name))
        return cls(levels, space.block_tokens, raw)

    def nbytes(self, level: str) -> float:
        """Expected bytes of a block."""
        return next((one.block_nbytes for one in self.levels if one.name == level), self.raw)

    def expected(self, offer: Offer, level: str, blocks: int, order: Order) -> Expected:
        """Return how ``blocks`` blocks at ``level`` should arrive."""
        each = self.nbytes(level)
        making = next((one.seconds for one in self.levels if one.name == level), 0.0)
        if order == "layers" and making:  # all is encoded, and only heads come, before the first layer goes
            return Expected(offer, blocks, int(blocks * each), blocks * making, blocks * _HEAD)
        if making and offer.bandwidth > 0:
            offer = msgspec.structs.replace(offer, bandwidth=min(offer.bandwidth, each / making))
        return Expected(offer, blocks, int(blocks * each), making)

    def path(self, offer: Offer, bandwidth: float) -> FetchPath:
        """Return the fetch as the cost model sees it, over a link of so many bytes/s."""
        n = self.tokens
        levels = tuple((one.name, one.block_nbytes / n, one.seconds / n) for one in self.levels)
        return FetchPath(self.nbytes(EXACT) / n, bandwidth, offer.rtt, offer.delay, offer.computes, levels)


def level_request(levels: tuple[Level, ...], decision: Decision, block_tokens: int, order: Order) -> LevelRequest:
    """Return the allowed levels, the deadline, and how many blocks will be used.

    Refinements are requested where all of a lossy level is fetched: they come when nothing else is left to send, and
    serve the next request of the context.
    """
    if not levels:
        return LevelRequest()
    # Layers are waited for: time that the peer saves is not to be spent on finer numbers than were priced.
    least = expected_kl(decision.level) if order == "layers" else 0.0
    names = tuple(level.name for level in levels)
    spared = sum(expected_kl(name) < least for name in names)
    # A tail is used as soon as both ends meet; what would be sent after it never is.
    refine = order == "layers" and not allowed_by(decision.level, None)
    return LevelRequest(
        names,
        deadline_ms=max(1, round(1000 * decision.within)) if decision.within > 0 else 0,
        expect=-(-decision.tokens // block_tokens),
        refine=refine,
        spared=spared,
    )


class FetchFailedError(Exception):
    """Fetched blocks were wrong or never came: the context is unusable. Start again with the same fetch."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a fetched context cannot be used: {reason}")
        self.reason = reason


class Compute(Protocol):
    """How the runtime computes the prompt's tokens from ``context.n`` to ``stop``; ``observe``: nothing else was waited
    for, so the prefill line may learn from the time it took."""

    def __call__(self, context: Context, stop: int, *, observe: bool = True) -> Logits: ...


@dataclass(frozen=True)
class Fetcher:
    """Starts fetches for one runtime. Any thread may call."""

    engine: Engine
    remote: Remote
    cost: CostModel
    clock: Callable[[], float]
    rng: Random

    def start(self, request: Request, cached: int) -> PromptFetch | None:
        """Find a peer with more of a prompt than the ``cached`` leading tokens, begin to fetch; None if it cannot pay.

        Waits for the answer at most a small share of what computing would take. The caller must `PromptFetch.close` it.
        """
        space, size, ids = self.engine.space, self.engine.space.block_tokens, request.ids
        first, usable = cached // size, (len(ids) - 1) // size
        patience = self.cost.patience(len(ids) - cached, cached) if usable > first else 0.0
        if patience < _SHORTEST:
            return None
        at = self.clock()
        # At least the last token is computed: a state at the very end of the prompt would be of no use.
        offer = self.remote.offer(space, ids[: usable * size], after=first, timeout=patience)
        took = self.clock() - at
        if offer is None:
            return None
        last = min(offer.state_blocks if space.needs_state else offer.blocks, usable)
        return PromptFetch(self, request, offer, (cached, last), took) if last > first else None


class PromptFetch:
    """One prompt's fetch. Used by one thread at a time; ``close`` it in any case.

    `prepare` may be called while another request computes; `finish` brings a context to the prompt's end.

    Attributes:
        way: how it proceeds now; it changes when the link disappoints.
        missed: why not as decided.
        tokens, views: how many fetched tokens were used, and their blocks (valid as long as they are referenced).
        loading: what may be in flight.
        lookup_seconds, prepared: seconds of the lookup, and of `prepare`.
    """

    def __init__(
        self, fetcher: Fetcher, request: Request, offer: Offer, run: tuple[int, int], lookup_seconds: float
    ) -> None:
        self._engine, self._remote, self._cost = fetcher.engine, fetcher.remote, fetcher.cost
        self._clock, self._rng = fetcher.clock, fetcher.rng
        self._ids, self.offer, self.lookup_seconds = request.ids, offer, lookup_seconds
        self._size = self._engine.space.block_tokens
        self._cached, self._last = run
        self._first = self._cached // self._size
        self._layers = [i for i, spec in enumerate(self._engine.space.layers) if spec.blocked]
        self._options = LevelOptions.of(self._engine, offer, request.max_kl)
        self.views: Sequence[BlockView] = ()
        self._began, self.prepared = self._clock(), 0.0
        self.missed, self.tokens = "", 0
        self.loading: Loading | None = None
        self._refined_later: Fetch | None = None
        self._watches: list[Watch] = []
        self.decision = self._choose(offer.bandwidth)
        self.way: Way = self.decision.way
        self._begin()

    @property
    def end(self) -> int:
        """Position after the last token that is fetched."""
        return self._last * self._size

    @property
    def waited(self) -> float:
        """Seconds of waiting for the peer so far."""
        return self.lookup_seconds + sum(watch.waited for watch in self._watches)

    @property
    def received(self) -> int:
        """Payload bytes so far."""
        return sum(watch.fetch.received for watch in self._watches)

    def refinements(self) -> Fetch | None:
        """Return the fetch, if refinements of its blocks may still come: the caller must stop it then."""
        if self.way != "layers" or not self.tokens or self._watch.fetch.ended not in (None, ""):
            return None
        self._refined_later = (
            self._watch.fetch if any(not allowed_by(view.header.level, None) for view in self.views) else None
        )
        return self._refined_later

    def close(self) -> None:
        """Stop the transfers, and reject a peer that sent what was not requested. Idempotent."""
        for watch in self._watches:
            if watch.fetch is not self._refined_later:
                watch.fetch.stop()
            if watch.fetch.ended in ("foreign", "level"):
                self._remote.reject(self.offer, watch.fetch.ended)

    def prepare(self) -> None:
        """Wait for what computing cannot overlap; nothing here needs the engine."""
        if self.way == "layers":
            watch = self._watch
            try:
                watch.wait(watch.fetch.heads)
                if self._layers:
                    watch.wait(partial(watch.fetch.wait_layer, self._layers[self._first_overlapped_layer()]))
            except LinkError:
                self._switch("link")
        self.prepared = self._clock() - self._began

    def finish(self, context: Context, compute: Compute) -> Logits:
        """Bring ``context``, which holds a leading part of the prompt, to its end.

        Raises FetchFailedError: then it must not be used, and this may be called again with another.
        """
        if self.way == "layers":
            return self._fetch_layerwise(context, compute)
        if self.way == "tail":
            return self._compute_and_fetch(context, compute)
        return compute(context, len(self._ids))

    @property
    def _watch(self) -> Watch:
        return self._watches[-1]

    def _choose(self, bandwidth: float) -> Decision:
        path = self._options.path(self.offer, bandwidth)
        return self._cost.choose(self._cached, self.end, len(self._ids), path, len(self._layers))

    def _begin(self) -> None:
        if self.way not in ("layers", "tail"):
            return
        order: Order = "layers" if self.way == "layers" else "tail"
        space, decision = self._engine.space, self.decision
        levels = level_request(self._options.levels, decision, self._size, order)
        request = FetchRequest(space, self._ids[: self.end], self._first, order, space.needs_state, levels)
        fetch = self._remote.fetch(self.offer, request)
        expected = self._options.expected(self.offer, decision.level, self._last - self._first, order)
        self._watches.append(Watch(fetch, expected, decision.deadline, self._otherwise, self._clock))

    def _otherwise(self, bandwidth: float) -> float:
        ways = self._choose(bandwidth).ways
        return min((seconds for way, seconds in ways.items() if way != "layers"), default=float("inf"))

    def _switch(self, reason: str) -> None:
        """Give up the fetch in layer order: what came of it is half a model deep, so it cannot be used. Fetch from the
        end if the link's present speed makes that worthwhile, else compute."""
        watch, self.missed = self._watch, reason
        dead, bandwidth = watch.fetch.ended is not None, watch.bandwidth
        watch.fetch.stop()
        self.way = "recompute"
        if reason == "link" and not dead and bandwidth > 0 and not self.offer.computes:
            again = self._choose(bandwidth)
            self.way = "tail" if again.way in ("tail", "layers") else "recompute"
            self.decision = msgspec.structs.replace(
                self.decision, level=again.level, within=again.within, tokens=again.tokens
            )
            self.offer = msgspec.structs.replace(self.offer, bandwidth=bandwidth)
            self._begin()

    def _first_overlapped_layer(self) -> int:
        """Number of the layer from which on the others arrive while the rest of the prompt is computed."""
        watch, count = self._watch, len(self._layers)
        rest = self._cost.prefill.seconds(min(len(self._ids) - self.end, _STRIDE), self.end) or 0.0
        whole = watch.nbytes / watch.bandwidth if watch.bandwidth > 0 else 0.0
        return max(0, int(count * (1 - rest / whole)) - 1) if whole > rest else 0

    def _fetch_layerwise(self, context: Context, compute: Compute) -> Logits:
        """Load the blocks as their layers arrive and compute the rest behind them."""
        watch, fetch = self._watch, self._watch.fetch
        self._align(context, compute)
        if not self._first * self._size <= context.n < self.end:
            self.way = "recompute"  # the cached part has changed since the lookup
            return compute(context, len(self._ids))
        try:
            views = list(watch.wait(fetch.heads))[context.n // self._size - self._first :]
            state = watch.wait(partial(_state, fetch)) if self._engine.space.needs_state else None
            if self._layers:
                watch.wait(partial(fetch.wait_layer, self._layers[0]))
            start = context.n
            self.loading = loading = self._engine.load(context, views, state, self._ready)
        except LinkError:
            self._switch("link")
            return self.finish(context, compute)
        except FormatError:
            self._reject("corrupt")
            return self.finish(context, compute)
        except ConfigError:  # no card any more
            self._switch("level")
            return self.finish(context, compute)
        try:
            try:
                logits = compute(context, len(self._ids), observe=False)
            finally:
                loading.wait()
        except LinkError:
            self._switch("link")
            raise FetchFailedError("link") from None
        except FormatError:
            self._reject("corrupt")
            raise FetchFailedError("corrupt") from None
        self._audit(context, start, views)
        self.tokens, self.views = len(views) * self._size, views
        return logits

    def _ready(self, layer: int) -> None:
        watch = self._watch
        watch.wait(partial(watch.fetch.wait_layer, layer))

    def _compute_and_fetch(self, context: Context, compute: Compute) -> Logits:
        """Compute from the front in steps until the fetched tail is reached, load that, compute the rest."""
        size, fetch, vain = self._size, self._watch.fetch, -1
        while True:
            whole = self._complete_tail_blocks()
            front, boundary = self.end - whole * size, -(-context.n // size) * size
            if boundary >= front:
                break
            stop = self._step(context.n, front)
            if stop <= context.n and whole != vain:
                # The link is about to bring a block before it could be computed. It gets that long, once a block.
                at, vain = self._clock(), whole
                fetch.tail(whole + 1, self._cost.prefill.seconds(size, context.n) or 0.0)
                self._watch.spent(at)
            else:
                compute(context, max(stop, (context.n // size + 1) * size))
        fetch.stop()
        if boundary < self.end:
            if boundary > context.n:
                compute(context, boundary)
            self._attach(context, (self.end - boundary) // size)
        return compute(context, len(self._ids))

    def _complete_tail_blocks(self) -> int:
        """Blocks at the end that could be loaded now."""
        fetch = self._watch.fetch
        whole = fetch.tail()
        if whole and self._engine.space.needs_state:
            try:
                whole = whole if fetch.state(0.0) is not None else 0
            except LinkError:
                whole = 0
        return whole

    def _step(self, at: int, front: int) -> int:
        """Where to compute to next; ``at`` itself if waiting for the next block is predicted to be quicker."""
        size, watch, line = self._size, self._watch, self._cost.prefill
        rate = watch.blocks * size
        stride = (at // _STRIDE + 1) * _STRIDE
        if watch.fetch.ended is not None:
            return min(front, stride)
        if rate <= 0 and at < self._cached + 2 * _LOOK:
            stride = min(stride, (at // _LOOK + 1) * _LOOK)
        alone = self._cost.meeting_point(at, front, rate, watch.lead)
        blocks = (front - at if alone is None else alone) // size
        if not blocks:
            # They would meet inside a block: it is computed, unless the link brings all missing blocks even before.
            computed, fetched = line.seconds(size, at) or 0.0, watch.lead + (front - at) / rate
            return at if fetched < computed else at // size * size + size
        fixed, each, *_ = line.coefficients or (0.0, 1.0)
        least = int(fixed / (_OVERHEAD * each * size)) + 1 if each else 1
        # Half the way, and then look again: the link may go faster, and what is computed twice is lost.
        step = min(blocks, max(least, -(-blocks // 2)))
        return min(at // size * size + step * size, stride, front)

    def _align(self, context: Context, compute: Compute) -> None:
        """Let ``context`` end where fetched blocks can follow: back at a boundary, or ahead if it cannot go back."""
        size, start = self._size, self._first * self._size
        if context.n < start:
            compute(context, start)
        elif context.n % size and not self._engine.crop(context, context.n // size * size):
            compute(context, min((context.n // size + 1) * size, len(self._ids)))

    def _attach(self, context: Context, count: int) -> None:
        """Load the last ``count`` blocks behind ``context``, once they are known to be good: else nothing happens.

        Raises FetchFailedError where that was wrong: streams can lie under right checksums."""
        fetch = self._watch.fetch
        try:
            views = list(fetch.views(count))
            state = fetch.state(0.0) if self._engine.space.needs_state else None
            # Twice checked: a context that is spoiled while it is filled would lose what was computed for its front.
            for view in [*views, *([state] if state is not None else [])]:
                view.verify()
            start, at = context.n, self._clock()
            loading = self._engine.load(context, views, state)
        except LinkError:
            self.missed = "link"
            return
        except ConfigError:
            self.missed = "level"
            return
        except FormatError:
            self._reject("corrupt")
            return
        try:
            loading.wait()
        except FormatError:
            self._reject("corrupt")
            raise FetchFailedError("corrupt") from None
        took = self._clock() - at
        self._audit(context, start, views)
        self.tokens, self.views = count * self._size, views
        self._learn(views, took)

    def _learn(self, views: Sequence[BlockView], seconds: float) -> None:
        levels = {view.header.level for view in views}
        if len(levels) == 1 and (level := levels.pop()) != "exact":
            nbytes = len(views) * self._size * self._engine.space.token_nbytes
            self._cost.unpack.observe(level, nbytes, seconds)

    def _audit(self, context: Context, start: int, views: Sequence[BlockView]) -> None:
        """Raise FetchFailedError unless the blocks, which are loaded from position ``start`` on, stand the audit.

        One that cannot be run is no fault of the peer's; its blocks are not used either.
        """
        stop = start + len(views) * self._size
        try:
            sound = rows_match(self._engine, context, start, stop, self._rng)
            if sound is None:
                sound = first_k_matches(self._engine, views, self._rng)
        except Exception as error:
            log.warning("an audit of fetched blocks failed, so they are computed: %s", error)
            self.missed, self.way = "unaudited", "recompute"
            self._watch.fetch.stop()
            raise FetchFailedError("unaudited") from error
        if sound is False:
            self._reject("audit")
            raise FetchFailedError("audit")

    def _reject(self, reason: str) -> None:
        """Reject the peer: it sent something wrong."""
        self.missed, self.way = reason, "recompute"
        self._watch.fetch.stop()
        self._remote.reject(self.offer, reason)


def _state(fetch: Fetch, timeout: float) -> BlockView:
    state = fetch.state(timeout)
    if state is None:
        raise LinkDownError("the states have not come yet")
    return state
