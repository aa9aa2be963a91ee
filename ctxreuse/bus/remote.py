"""The clouds of an edge as one `Remote`: who holds or would compute most of a context, and fetching it from there."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from ctxreuse.block import block_layout
from ctxreuse.bus.base import Greeting, Link
from ctxreuse.bus.remote_fetch import Pace, TimedFetch
from ctxreuse.bus.remote_levels import Levels
from ctxreuse.bus.serve_quarantine import Quarantine
from ctxreuse.bus.transfer import Assembly
from ctxreuse.bus.wire import Wish
from ctxreuse.bus.wire_messages import MAX_LEVELS
from ctxreuse.codec import Shelf
from ctxreuse.cost import Level
from ctxreuse.keys import ROOT, Tokens, as_tokens, prefix_keys
from ctxreuse.model import ModelSpace
from ctxreuse.runtime.remote import Ask, Fetch, Offer, Order

__all__ = ["Clouds", "Speed"]

#: Chains of keys that are remembered: a request asks several times for the same.
_CHAINS = 16
#: Heads and padding of a block, in bytes: they are small beside its planes.
_HEAD = 4096


class Speed(Protocol):
    """A link's estimates (`ctxreuse.cost.LinkEstimate`): bytes/s (0 while unknown), seconds, and how fast the peer
    encodes."""

    @property
    def bandwidth(self) -> float: ...
    @property
    def rtt(self) -> float: ...
    @property
    def encoding(self) -> tuple[float, float]: ...


class _Peer(NamedTuple):
    link: Link
    speed: Speed
    pace: Pace


class Clouds:
    """See `ctxreuse.runtime.remote.Remote`. Any thread may call; a cloud that is away is only not asked.

    ``links``: each with the estimate that is fed from it; they stay the caller's to close. ``quarantine``: who is not
    asked because of what it sent (default: for this process's life). ``seconds(first, last)``: what computing the
    context's tokens from ``first`` to ``last`` would take here, to compare clouds (None: not known yet; then the more
    blocks the better). ``compute_blocks``: contexts that lack fewer blocks are never given to a cloud to compute.
    ``shelf``: the cards with which lossy blocks can be read here (None: clouds are asked for exact blocks alone).
    """

    def __init__(
        self,
        links: Iterable[tuple[Link, Speed]],
        *,
        quarantine: Quarantine | None = None,
        seconds: Callable[[int, int], float | None] | None = None,
        compute_blocks: int = 4,
        shelf: Shelf | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = {link.name: _Peer(link, speed, Pace()) for link, speed in links}
        self.quarantine = quarantine or Quarantine(None, seconds=24 * 3600.0, clock=time.time)
        self._seconds, self._compute_blocks, self._clock = seconds, compute_blocks, clock
        self._levels = Levels(shelf) if shelf is not None else None
        self._chains: OrderedDict[tuple[bytes, bytes, bytes], list[bytes]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def links(self) -> tuple[Link, ...]:
        """All links, the preferred one first."""
        return tuple(peer.link for peer in self._peers.values())

    def offer(self, space: ModelSpace, tokens: Tokens, *, after: int, timeout: float) -> Offer | None:
        """See `Remote.offer`."""
        ids = as_tokens(tokens)
        count = len(ids) // space.block_tokens
        if count <= after:
            return None
        held: list[Offer] = []
        unsure: list[tuple[_Peer, list[bytes]]] = []
        asked = list(self._serving())
        for peer, greeting in asked:
            keys = self._keys(greeting, space, ids)
            known = peer.link.announced(keys)
            if known is not None and (known <= after or not space.needs_state):
                held += self._holds(peer, space, known, known, after)
            else:  # announcements say nothing of states
                unsure.append((peer, keys))
        deadline = self._clock() + timeout
        for left, (peer, keys) in zip(range(len(unsure), 0, -1), unsure):
            # A share each, so that one that does not answer leaves time for the others.
            share = max(0.0, deadline - self._clock()) / left
            found = peer.link.match(space.digest, keys, share) if share > 0 else None
            if found is not None:
                states = found.state_blocks if space.needs_state else found.blocks
                held += self._holds(peer, space, found.blocks, states, after)
        held += self._would_compute(asked, space, count, after)
        size = space.block_tokens
        priced = self._seconds(after * size, count * size) is not None if self._seconds is not None else False
        return max(held, key=lambda offer: self._gain(offer, space, after, priced), default=None)

    def _holds(self, peer: _Peer, space: ModelSpace, blocks: int, states: int, after: int) -> list[Offer]:
        if (states if space.needs_state else blocks) <= after:
            return []
        return [self._offer(peer, space, blocks, states)]

    def _would_compute(
        self, asked: Sequence[tuple[_Peer, Greeting]], space: ModelSpace, count: int, after: int
    ) -> list[Offer]:
        if count - after < self._compute_blocks:
            return []
        offers = []
        for peer, greeting in asked:
            if space.digest in greeting.spaces:
                offer = self._offer(peer, space, count, count, computes=True, delay=peer.pace.delay)
                # Blocks come no faster than they are made.
                made = offer.block_nbytes * peer.pace.tokens_per_second / space.block_tokens
                slower = min(offer.bandwidth, made) if offer.bandwidth else 0.0
                offers.append(msgspec.structs.replace(offer, bandwidth=slower))
        return offers

    def _offer(
        self, peer: _Peer, space: ModelSpace, blocks: int, states: int, computes: bool = False, delay: float = 0.0
    ) -> Offer:
        return Offer(
            peer=peer.link.name,
            source="cloud",
            blocks=blocks,
            state_blocks=states,
            block_nbytes=block_layout(space).nbytes + _HEAD,
            bandwidth=peer.speed.bandwidth,
            rtt=peer.speed.rtt,
            computes=computes,
            delay=delay,
            levels=self._sendable(peer, space),
        )

    def _sendable(self, peer: _Peer, space: ModelSpace) -> tuple[Level, ...]:
        greeting = peer.link.welcome
        if self._levels is None or greeting is None:
            return ()
        return self._levels.of(space, greeting, peer.speed.encoding)

    def _gain(self, offer: Offer, space: ModelSpace, after: int, known: bool) -> tuple[float, float]:
        """What is compared between offers: seconds saved, or while that is not known blocks, then seconds."""
        blocks = (offer.state_blocks if space.needs_state else offer.blocks) - after
        spent = offer.rtt + offer.delay
        spent += blocks * offer.block_nbytes / offer.bandwidth if offer.bandwidth else 0.0
        size = space.block_tokens
        saved = self._seconds(after * size, (after + blocks) * size) if self._seconds is not None and known else None
        if saved is None:
            # Computing elsewhere is a last resort where nothing says how long it would take here.
            return (-1.0 if offer.computes else float(blocks)), -spent
        return saved - spent, -spent

    def fetch(
        self,
        offer: Offer,
        space: ModelSpace,
        tokens: Tokens,
        *,
        first: int,
        last: int,
        order: Order,
        state: bool,
        ask: Ask | None = None,
    ) -> Fetch:
        """See `Remote.fetch`; from a cloud that has gone meanwhile it is a fetch that has ended."""
        ids = as_tokens(tokens)[: last * space.block_tokens]
        peer = self._peers.get(offer.peer)
        greeting = peer.link.welcome if peer is not None else None
        if peer is None or greeting is None or self.quarantine.reason(offer.peer) is not None:
            keys = prefix_keys(space.digest, bytes(16), ids, space.block_tokens)
            parent = keys[first - 1] if first else ROOT
            gone = Assembly(space, keys[first:], ids[first * space.block_tokens :], first=first, parent=parent)
            gone.end("down")
            return gone
        keys = self._keys(greeting, space, ids)
        payload, window = _window(peer.speed)
        wish = _wish(ask, peer.speed)
        if not offer.computes:
            return peer.link.fetch(
                space, keys, ids, first=first, order=order, state=state, payload=payload, window=window, wish=wish
            )
        fetch = peer.link.prefill(space, keys, ids, first=first, state=state, payload=payload, window=window, wish=wish)
        return TimedFetch(fetch, peer.pace, (last - first) * space.block_tokens, self._clock)

    def reject(self, offer: Offer, reason: str) -> None:
        """See `Remote.reject`."""
        self.quarantine.add(offer.peer, reason)

    def _serving(self) -> Iterator[tuple[_Peer, Greeting]]:
        for name, peer in self._peers.items():
            greeting = peer.link.welcome
            if peer.link.state == "up" and greeting is not None and self.quarantine.reason(name) is None:
                yield peer, greeting

    def _keys(self, greeting: Greeting, space: ModelSpace, ids: Tokens) -> list[bytes]:
        """Keys of the whole blocks of a context on one link."""
        name = greeting.salt, space.digest, ids.tobytes()
        with self._lock:
            keys = self._chains.get(name)
            if keys is not None:
                self._chains.move_to_end(name)
                return keys
        keys = prefix_keys(space.digest, greeting.salt, ids, space.block_tokens)
        with self._lock:
            self._chains[name] = keys
            while len(self._chains) > _CHAINS:
                self._chains.popitem(last=False)
        return keys


def _wish(ask: Ask | None, speed: Speed) -> Wish | None:
    """What goes with a request. The request takes half of a round trip to get there, and each byte half of one back."""
    if ask is None or not ask.levels:
        return None
    deadline = max(1, int(1000 * (ask.within - speed.rtt))) if ask.within > 0 else 0
    return Wish(ask.levels[:MAX_LEVELS], int(speed.bandwidth), deadline, ask.expect, ask.refine, ask.spared)


def _window(speed: Speed) -> tuple[int, int]:
    """Bytes a payload and payloads on their way: some 50 ms of the link each, twice the round trip together."""
    if not speed.bandwidth:
        return 256 << 10, 16
    payload = int(min(max(speed.bandwidth * 0.05, 64 << 10), 1 << 20))
    return payload, int(min(max(2 * speed.bandwidth * speed.rtt / payload + 4, 8), 128))
