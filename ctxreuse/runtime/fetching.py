"""Getting from another node what a prompt lacks here, in the way that takes the least seconds, and never at any price.

Two ways. ``layers``: all missing blocks are fetched layer by layer, and the rest of the prompt is computed behind them
as they come. ``tail``: blocks come from the end while the engine computes from the front; where both meet, the fetched
ones are loaded behind the computed ones (Jin et al., "Compute Or Load KV Cache? Why Not Both?", arXiv 2410.03065). The
second cannot be slower than computing, whatever the link does, but for its smaller steps near the meeting point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Protocol

import msgspec

from ctxreuse.cost import CostModel, Decision, Way
from ctxreuse.errors import ConfigError, FormatError, LinkDownError, LinkError
from ctxreuse.keys import Tokens
from ctxreuse.levels import fits
from ctxreuse.runtime.asking import Menu, wish
from ctxreuse.runtime.audit import first_k_matches
from ctxreuse.runtime.watch import Watch

if TYPE_CHECKING:
    from ctxreuse.block import BlockView
    from ctxreuse.engines.base import Engine, Live, Loading, Logits
    from ctxreuse.runtime.remote import Fetch, Offer, Order, Remote

__all__ = ["FetchFailedError", "Fetching", "ask"]

#: Tokens computed at a time while the ends are far apart: what engines put through the model together anyway, cut at
#: the same multiples, so that a fetch of which nothing comes costs nothing.
_STRIDE = 512
#: The first two steps behind a link that has never been measured: a whole stride took 1.1 of the 1.13 seconds that a
#: first contact over 1 Gbit/s needed, and shorter ones cost little where nothing comes.
_LOOK = 128
#: A step is long enough that its fixed cost stays below this share of it.
_OVERHEAD = 0.03
#: Seconds. If a peer's answer may take less than this, nobody is asked: it is about the shortest round trip there is.
_SHORTEST = 0.0005


class FetchFailedError(Exception):
    """A context was spoiled by blocks that were wrong or never came; start again: the same fetch goes on otherwise."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a fetched context cannot be used: {reason}")
        self.reason = reason


class Compute(Protocol):
    """How the runtime computes the prompt's tokens from ``live.n`` to ``stop``; ``observe``: nothing else was waited
    for, so the prefill line may learn from the time it took."""

    def __call__(self, live: Live, stop: int, *, observe: bool = True) -> Logits: ...


def ask(
    engine: Engine,
    remote: Remote,
    cost: CostModel,
    ids: Tokens,
    held: int,
    clock: Callable[[], float],
    rng: Random,
    *,
    lossy: str | None = None,
) -> Fetching | None:
    """Ask who has more of ``ids`` than the ``held`` leading tokens and begin to fetch it; None if it cannot pay.

    ``lossy``: the worst level at which it may come (None: exact). Waits for the answer at most a small share of what
    computing would take. The caller must `Fetching.close` it.
    """
    space, size = engine.space, engine.space.block_tokens
    first, usable = held // size, (len(ids) - 1) // size
    patience = cost.patience(len(ids) - held, held) if usable > first else 0.0
    if patience < _SHORTEST:
        return None
    at = clock()
    # At least the last token is computed: a state at the very end of the prompt would be of no use.
    offer = remote.offer(space, ids[: usable * size], after=first, timeout=patience)
    asked = clock() - at
    if offer is None:
        return None
    last = min(offer.state_blocks if space.needs_state else offer.blocks, usable)
    if last <= first:
        return None
    return Fetching(engine, remote, cost, ids, offer, (first, last, held), asked, clock, rng, lossy)


class Fetching:
    """One request's fetch. Used by one thread at a time; ``close`` it in any case.

    `prepare` may be called while another request computes; `finish` brings a context to the prompt's end. ``way`` is
    how it goes on now (it changes when the link disappoints), ``missed`` why not as decided, ``tokens`` how many
    fetched ones were used and ``views`` their blocks (valid as long as they are referenced), ``loading`` what may be in
    flight, ``asked`` seconds of asking, ``prepared`` seconds of preparing.
    """

    def __init__(
        self,
        engine: Engine,
        remote: Remote,
        cost: CostModel,
        ids: Tokens,
        offer: Offer,
        run: tuple[int, int, int],
        asked: float,
        clock: Callable[[], float],
        rng: Random,
        lossy: str | None = None,
    ) -> None:
        self._engine, self._remote, self._cost, self._ids, self.offer = engine, remote, cost, ids, offer
        self._first, self._last, self._held = run
        self._size = engine.space.block_tokens
        self._layers = [i for i, spec in enumerate(engine.space.layers) if spec.blocked]
        self._clock, self._rng, self.asked = clock, rng, asked
        self._menu, self.lossy = Menu.of(engine, offer, lossy), lossy
        self.views: Sequence[BlockView] = ()
        self.began = clock()
        self.prepared = 0.0
        self.missed, self.tokens = "", 0
        self.loading: Loading | None = None
        self._late: Fetch | None = None
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
        return self.asked + sum(watch.waited for watch in self._watches)

    @property
    def received(self) -> int:
        """Payload bytes so far."""
        return sum(watch.fetch.received for watch in self._watches)

    def late(self) -> Fetch | None:
        """The fetch, if what it brought may still become finer: it is then the caller's to stop."""
        if self.way != "layers" or not self.tokens or self._watch.fetch.ended not in (None, ""):
            return None
        self._late = self._watch.fetch if any(not fits(view.header.level, None) for view in self.views) else None
        return self._late

    def close(self) -> None:
        """Want nothing more of the peer, and tell on it if it sent what was not asked for. Idempotent."""
        for watch in self._watches:
            if watch.fetch is not self._late:
                watch.fetch.stop()
            if watch.fetch.ended in ("foreign", "level"):
                self._remote.reject(self.offer, watch.fetch.ended)

    def prepare(self) -> None:
        """Wait for what computing cannot overlap; nothing here needs the engine."""
        if self.way == "layers":
            self._prepare(self._watch)
        self.prepared = self._clock() - self.began

    def _prepare(self, watch: Watch) -> None:
        try:
            watch.wait(watch.fetch.heads)
            if self._layers:
                watch.wait(partial(watch.fetch.wait_layer, self._layers[self._leading()]))
        except LinkError:
            self._switch("link")

    def finish(self, live: Live, compute: Compute) -> Logits:
        """Bring ``live``, which holds a leading part of the prompt, to its end. Raises FetchFailedError: then ``live``
        must not be used, and this may be called again with another."""
        if self.way == "layers":
            return self._follow(live, compute)
        if self.way == "tail":
            return self._meet(live, compute)
        return compute(live, len(self._ids))

    @property
    def _watch(self) -> Watch:
        return self._watches[-1]

    def _choose(self, bandwidth: float) -> Decision:
        path = self._menu.path(self.offer, bandwidth)
        return self._cost.choose(self._held, self.end, len(self._ids), path, len(self._layers))

    def _begin(self) -> None:
        if self.way not in ("layers", "tail"):
            return
        order: Order = "layers" if self.way == "layers" else "tail"
        space, decision = self._engine.space, self.decision
        fetch = self._remote.fetch(
            self.offer,
            space,
            self._ids,
            first=self._first,
            last=self._last,
            order=order,
            state=space.needs_state,
            **wish(self._menu.levels, decision, self._size, order),
        )
        expected = self._menu.expected(self.offer, decision.level, self._last - self._first, order)
        self._watches.append(Watch(fetch, expected, decision.deadline, self._otherwise, self._clock))

    def _otherwise(self, bandwidth: float) -> float:
        ways = self._choose(bandwidth).ways
        return min((seconds for way, seconds in ways.items() if way != "layers"), default=float("inf"))

    def _switch(self, reason: str) -> None:
        """The fetch in layer order is no good: what came of it is half a model deep, so nothing of it can be kept. Meet
        in the middle if the link, as it is now, still makes that worth while, else compute."""
        watch, self.missed = self._watch, reason
        dead, bandwidth = watch.fetch.ended is not None, watch.bandwidth
        watch.fetch.stop()
        self.way = "recompute"
        if reason == "link" and not dead and bandwidth > 0 and not self.offer.computes:
            anew = self._choose(bandwidth)
            self.way = "tail" if anew.way in ("tail", "layers") else "recompute"
            self.decision = msgspec.structs.replace(
                self.decision, level=anew.level, within=anew.within, tokens=anew.tokens
            )
            self.offer = msgspec.structs.replace(self.offer, bandwidth=bandwidth)
            self._begin()

    def _leading(self) -> int:
        """Number of the layer from which on the others arrive while the rest of the prompt is computed."""
        watch, count = self._watch, len(self._layers)
        rest = self._cost.prefill.seconds(min(len(self._ids) - self.end, _STRIDE), self.end) or 0.0
        whole = watch.nbytes / watch.bandwidth if watch.bandwidth > 0 else 0.0
        return max(0, int(count * (1 - rest / whole)) - 1) if whole > rest else 0

    def _follow(self, live: Live, compute: Compute) -> Logits:
        """Load the blocks as their layers arrive and compute the rest behind them."""
        watch, fetch = self._watch, self._watch.fetch
        self._align(live, compute)
        if not self._first * self._size <= live.n < self.end:
            self.way = "recompute"  # what is held has changed since we asked
            return compute(live, len(self._ids))
        try:
            views = list(watch.wait(fetch.heads))[live.n // self._size - self._first :]
            state = watch.wait(partial(_state, fetch)) if self._engine.space.needs_state else None
            if self._layers:
                watch.wait(partial(fetch.wait_layer, self._layers[0]))
            if self._liar(views):
                return self.finish(live, compute)
            self.loading = loading = self._engine.load(live, views, state, self._ready)
        except LinkError:
            self._switch("link")
            return self.finish(live, compute)
        except FormatError:
            self._reject("corrupt")
            return self.finish(live, compute)
        except ConfigError:  # no card any more
            self._switch("level")
            return self.finish(live, compute)
        try:
            try:
                logits = compute(live, len(self._ids), observe=False)
            finally:
                loading.wait()
        except LinkError:
            self._switch("link")
            raise FetchFailedError("link") from None
        except FormatError:
            self._reject("corrupt")
            raise FetchFailedError("corrupt") from None
        self.tokens, self.views = len(views) * self._size, views
        return logits

    def _ready(self, layer: int) -> None:
        watch = self._watch
        watch.wait(partial(watch.fetch.wait_layer, layer))

    def _meet(self, live: Live, compute: Compute) -> Logits:
        """Compute from the front in steps until the fetched tail is reached, load that, compute the rest."""
        size, fetch, vain = self._size, self._watch.fetch, -1
        while True:
            whole = self._whole()
            front, boundary = self.end - whole * size, -(-live.n // size) * size
            if boundary >= front:
                break
            stop = self._step(live.n, front)
            if stop <= live.n and whole != vain:
                # The link is about to bring a block before it could be computed. It gets that long, once a block.
                at, vain = self._clock(), whole
                fetch.tail(whole + 1, self._cost.prefill.seconds(size, live.n) or 0.0)
                self._watch.spent(at)
            else:
                compute(live, max(stop, (live.n // size + 1) * size))
        fetch.stop()
        if boundary < self.end:
            if boundary > live.n:
                compute(live, boundary)
            self._attach(live, (self.end - boundary) // size)
        return compute(live, len(self._ids))

    def _whole(self) -> int:
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
        if rate <= 0 and at < self._held + 2 * _LOOK:
            stride = min(stride, (at // _LOOK + 1) * _LOOK)
        alone = self._cost.meet(at, front, rate, watch.lead)
        blocks = (front - at if alone is None else alone) // size
        if not blocks:
            # They would meet inside a block: it is computed, unless the link brings all that lacks even before.
            computed, fetched = line.seconds(size, at) or 0.0, watch.lead + (front - at) / rate
            return at if fetched < computed else at // size * size + size
        fixed, each, *_ = line.coefficients or (0.0, 1.0)
        least = int(fixed / (_OVERHEAD * each * size)) + 1 if each else 1
        # Half the way, and then look again: the link may go faster, and what is computed twice is lost.
        step = min(blocks, max(least, -(-blocks // 2)))
        return min(at // size * size + step * size, stride, front)

    def _align(self, live: Live, compute: Compute) -> None:
        """Let ``live`` end where the fetched blocks, or the later ones of them, can be loaded: back to a boundary, or
        on to one if the model cannot go back."""
        size, start = self._size, self._first * self._size
        if live.n < start:
            compute(live, start)
        elif live.n % size and not self._engine.crop(live, live.n // size * size):
            compute(live, min((live.n // size + 1) * size, len(self._ids)))

    def _attach(self, live: Live, count: int) -> None:
        """Load the last ``count`` blocks behind ``live``, once they are known to be good: else nothing happens.

        Raises FetchFailedError where that was wrong: streams can lie under right checksums."""
        fetch = self._watch.fetch
        try:
            views = list(fetch.views(count))
            state = fetch.state(0.0) if self._engine.space.needs_state else None
            # Twice checked: a context that is spoiled while it is filled would lose what was computed for its front.
            for view in [*views, *([state] if state is not None else [])]:
                view.verify()
            if self._liar(views):
                return
            at = self._clock()
            loading = self._engine.load(live, views, state)
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
        self.tokens, self.views = count * self._size, views
        self._learn(views, self._clock() - at)

    def _learn(self, views: Sequence[BlockView], seconds: float) -> None:
        levels = {view.header.level for view in views}
        if len(levels) == 1 and (level := levels.pop()) != "exact":
            nbytes = len(views) * self._size * self._engine.space.token_nbytes
            self._cost.unpack.observe(level, nbytes, seconds)

    def _liar(self, views: Sequence[BlockView]) -> bool:
        if first_k_matches(self._engine, views, self._rng) is False:
            self._reject("audit")
            return True
        return False

    def _reject(self, reason: str) -> None:
        """Have done with this peer: it sent what is wrong."""
        self.missed, self.way = reason, "recompute"
        self._watch.fetch.stop()
        self._remote.reject(self.offer, reason)


def _state(fetch: Fetch, timeout: float) -> BlockView:
    state = fetch.state(timeout)
    if state is None:
        raise LinkDownError("the states have not come yet")
    return state
