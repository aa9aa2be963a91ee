"""A peer in the same process: real sealed blocks that arrive at the pace of a link that is told, not measured.

It stands in for a network where one would only blur what is looked at: what the runtime predicts and decides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, parse
from ctxreuse.bus.remote import FetchRequest, LevelRequest, Offer, Order
from ctxreuse.codec import Codec
from ctxreuse.cost import Level
from ctxreuse.engines.base import Engine
from ctxreuse.errors import LinkDownError
from ctxreuse.identity.keys import ROOT, Tokens, prefix_keys, tenant_salt
from ctxreuse.identity.model import ModelSpace

__all__ = ["Held", "NearbyFetch", "NearbyRemote", "constant"]

Bytes = npt.NDArray[np.uint8]
#: ``pace(began, now)``: bytes that a link has let through between two moments (seconds since the peer was made), or the
#: reason why it is broken.
Pace = Callable[[float, float], float | str]


def constant(bandwidth: float, rtt: float) -> Pace:
    """A link of ``bandwidth`` bytes/s behind one round trip."""
    return lambda began, now: max(0.0, now - began - rtt) * bandwidth


class Held:
    """A context as a peer holds it: its ids, its blocks as sealed bytes under the keys of a link, its last state."""

    def __init__(self, engine: Engine, tokens: Tokens) -> None:
        space, size = engine.space, engine.space.block_tokens
        self.tokens = tokens[: len(tokens) // size * size]
        context = engine.new_context(len(self.tokens))
        engine.prefill(context, self.tokens)
        keys = prefix_keys(space.digest, tenant_salt("link"), self.tokens, size)
        self.blocks = list(engine.export(context, keys, ROOT, 0))
        self.state: Bytes | None = None
        if space.needs_state:
            parent = keys[-2] if len(keys) > 1 else ROOT
            self.state = engine.export_state(context, keys[-1], parent, len(self.tokens))


class NearbyFetch:
    """See `ctxreuse.bus.remote.Fetch`. Bytes are copied when somebody looks, as many as ``pace`` says."""

    def __init__(
        self,
        blocks: Sequence[Bytes],
        state: Bytes | None,
        order: Order,
        pace: Pace,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._items = [np.zeros_like(data) for data in (*blocks, *([state] if state is not None else []))]
        self._sources = [*blocks, *([state] if state is not None else [])]
        self._layouts = [parse(data) for data in self._sources]
        self._count, self._state = len(blocks), state is not None
        self._pace, self._clock, self._sleep = pace, clock, sleep
        self._pieces = self._ordered(order)
        self._next = self._received = 0
        self._filled = [0] * len(self._items)
        self._began, self._lock = clock(), threading.Lock()
        self._ended: str | None = None

    def _ordered(self, order: Order) -> list[tuple[int, int, int]]:
        """(item, start, stop) of each part in the order of sending; a part is a head, or the planes of one layer."""
        cuts = []
        for view, data in zip(self._layouts, self._sources):
            starts = [view.offset(p.layer, p.role) for p in view.layout.planes]
            firsts = [at for at, p, q in zip(starts, view.layout.planes, (None, *view.layout.planes)) if q is None
                      or p.layer != q.layer]  # fmt: skip
            cuts.append([0, *firsts, data.nbytes])
        items = range(self._count)
        first = [(self._count, 0, self._sources[-1].nbytes)] if self._state else []
        if order == "tail":
            return [*first, *((i, a, b) for i in reversed(items) for a, b in zip(cuts[i], cuts[i][1:]))]
        parts = max(len(cut) for cut in cuts[: self._count]) - 1
        heads = [(i, cuts[i][0], cuts[i][1]) for i in items]
        return [*heads, *first, *((i, cuts[i][p], cuts[i][p + 1]) for p in range(1, parts) for i in items)]

    def _pump(self) -> None:
        with self._lock:
            if self._ended is not None:
                return
            through = self._pace(self._began, self._clock())
            while self._next < len(self._pieces):
                item, start, stop = self._pieces[self._next]
                if isinstance(through, str) or self._received + stop - start > through:
                    break
                self._items[item][start:stop] = self._sources[item][start:stop]
                self._filled[item] = stop  # the parts of an item come in their order
                self._received += stop - start
                self._next += 1
            else:
                self._ended = ""
            if isinstance(through, str) and self._ended is None:
                self._ended = through

    def _wait(self, done: Callable[[], bool], timeout: float) -> bool:
        until = self._clock() + timeout
        while True:
            self._pump()
            if done():
                return True
            left = until - self._clock()
            if self._ended is not None or left <= 0:
                return False
            self._sleep(min(left, 0.0005))

    @property
    def count(self) -> int:
        return self._count

    def heads(self, timeout: float) -> Sequence[BlockView]:
        if not self._wait(lambda: all(self._filled[: self._count]), timeout):
            raise LinkDownError("not all heads have come")
        return [parse(data) for data in self._items[: self._count]]

    def wait_layer(self, layer: int, timeout: float) -> None:
        def there() -> bool:
            views = self._layouts[: self._count]
            return all(filled > view.offset(layer, "v") for filled, view in zip(self._filled, views))

        if not self._wait(there, timeout):
            raise LinkDownError(f"layer {layer} has not come")

    def tail(self, least: int = 0, timeout: float = 0.0) -> int:
        self._wait(lambda: self._whole() >= least, timeout)
        return self._whole()

    def _whole(self) -> int:
        whole = 0
        while whole < self._count and self._complete(self._count - 1 - whole):
            whole += 1
        return whole

    def _complete(self, item: int) -> bool:
        return self._filled[item] == self._items[item].nbytes

    def views(self, last: int) -> Sequence[BlockView]:
        assert last <= self._whole(), "views of blocks that have not come"
        return [parse(data) for data in self._items[self._count - last : self._count]]

    def refinements(self, last: int) -> Sequence[BlockView | None]:
        return [None] * last

    def state(self, timeout: float) -> BlockView | None:
        there = self._state and self._wait(lambda: self._complete(self._count), timeout)
        return parse(self._items[-1]) if there else None

    @property
    def ended(self) -> str | None:
        self._pump()
        return self._ended

    @property
    def received(self) -> int:
        self._pump()
        return self._received

    def stop(self) -> None:
        with self._lock:
            self._ended = self._ended if self._ended is not None else "stopped"


class NearbyRemote:
    """See `ctxreuse.bus.remote.Remote`: one peer that holds one context. ``offered`` is the bandwidth that it
    claims (0: not measured yet), ``pace`` makes that of each fetch. ``codec``: it offers all levels of that and sends
    every block at ``level`` ("": exact) to whoever allows any; ``asks`` is what fetches allowed."""

    def __init__(
        self,
        held: Held,
        pace: Pace,
        *,
        offered: float,
        rtt: float = 0.0,
        source: Literal["edge", "cloud"] = "cloud",
        codec: Codec | None = None,
        level: str = "",
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.codec, self.level, self.asks = codec, level, list[LevelRequest]()
        self.held, self.pace, self.offered, self.rtt, self.source = held, pace, offered, rtt, source
        made = clock()
        self.clock, self.sleep = lambda: clock() - made, sleep
        self.fetches: list[tuple[Order, NearbyFetch]] = []
        self.rejected: list[str] = []
        self.asked = 0

    def offer(self, space: ModelSpace, tokens: Tokens, *, after: int, timeout: float) -> Offer | None:
        self.asked += 1
        if self.rejected:
            return None
        size = space.block_tokens
        n = min(len(tokens), len(self.held.tokens))
        differ = np.flatnonzero(tokens[:n] != self.held.tokens[:n])
        blocks = (int(differ[0]) if len(differ) else n) // size
        resumed = blocks if not space.needs_state or blocks == len(self.held.blocks) else 0
        if min(blocks, resumed) <= after:
            return None
        nbytes, levels = self.held.blocks[0].nbytes, self._levels()
        return Offer("nearby", self.source, blocks, resumed, nbytes, self.offered, self.rtt, levels=levels)

    def _levels(self) -> tuple[Level, ...]:
        """All that the codec has besides ``exact``, by their true size."""
        if self.codec is None:
            return ()
        names = [(info.name, f"{info.name}@{self.codec.digest[:16]}" if info.lossy else info.name)
                 for info in self.codec.levels if info.name != "exact"]  # fmt: skip
        first = parse(self.held.blocks[0])
        return tuple(Level(full, self.codec.encode(first, name).nbytes) for name, full in names)

    def fetch(self, offer: Offer, request: FetchRequest) -> NearbyFetch:
        self.asks.append(request.levels)
        blocks = self.held.blocks[request.first : len(request.tokens) // request.space.block_tokens]
        if request.levels.levels and self.codec is not None and self.level:
            blocks = [self.codec.encode(parse(data), self.level) for data in blocks]
        order, state = request.order, self.held.state if request.state else None
        fetch = NearbyFetch(blocks, state, order, self.pace, self.clock, self.sleep)
        self.fetches.append((order, fetch))
        return fetch

    def reject(self, offer: Offer, reason: str) -> None:
        self.rejected.append(reason)
