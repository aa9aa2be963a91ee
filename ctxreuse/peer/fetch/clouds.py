"""The clouds of an edge as one `Remote`: which one stores or would compute most of a context, and fetching from it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from ctxreuse.block.format import block_layout
from ctxreuse.block.levels import PACKED
from ctxreuse.bus.protocol.base import Link
from ctxreuse.bus.protocol.messages import MAX_LEVELS, Welcome
from ctxreuse.bus.remote import Fetch, FetchRequest, LevelRequest, Offer
from ctxreuse.bus.transfer.receive import FetchBuffer
from ctxreuse.codec import Codec, LevelName, ProfileStore
from ctxreuse.cost import Level, LinkEstimate
from ctxreuse.cost.levels import JOINT_WORK, work_of
from ctxreuse.errors import CtxReuseError
from ctxreuse.identity.keys import Tokens, as_tokens, prefix_keys
from ctxreuse.identity.model import ModelSpace
from ctxreuse.peer.quarantine import Quarantine

__all__ = ["CloudPool", "PrefillSpeed"]

#: Chains of keys, and codecs, that are cached: a request uses the same ones several times.
_CHAINS, _CODECS = 16, 16
#: Heads and padding of a block, in bytes: they are small beside its planes.
_HEAD = 4096
#: Contexts with fewer missing blocks are never given to a cloud to compute.
_COMPUTE_BLOCKS = 4
_QUARANTINE_SECONDS = 24 * 3600.0
#: Tokens/s expected of a cloud that has not computed anything yet: enough to be tried where a device is slow.
_FIRST_GUESS = 2_000.0
_WEIGHT = 0.3


class PrefillSpeed:
    """Tokens that a cloud computes per second for this node, and seconds until its first block. Any thread may call."""

    def __init__(self) -> None:
        self.tokens_per_second, self.delay = _FIRST_GUESS, 0.0
        self._lock = threading.Lock()
        self._seen = False

    def record(self, tokens: int, first: float, total: float) -> None:
        """Learn from ``tokens`` that came in ``total`` seconds, the first of them after ``first`` seconds."""
        first = min(first, total / 2)  # blocks that another request had made come all at once
        rate = tokens / max(total - first, 1e-3)
        with self._lock:
            if not self._seen:
                self.tokens_per_second, self.delay, self._seen = rate, first, True
            self.tokens_per_second += _WEIGHT * (rate - self.tokens_per_second)
            self.delay += _WEIGHT * (first - self.delay)


class _PeerLevels:
    """Levels that clouds send and that ``profiles`` can read. Any thread may call."""

    def __init__(self, profiles: ProfileStore) -> None:
        self._profiles = profiles
        self._lock = threading.Lock()
        self._codecs: OrderedDict[tuple[bytes, str], Codec] = OrderedDict()

    def of(self, space: ModelSpace, welcome: Welcome, encoding: tuple[float, float]) -> tuple[Level, ...]:
        """Return the levels at which the cloud can send blocks of ``space``, least KL first.

        ``encoding``: seconds in which it encodes a byte of raw planes, packed and lossy.
        """
        found = []
        packed, lossy = (each * space.token_nbytes * space.block_tokens for each in encoding)
        if PACKED in welcome.packs:
            codec = self._codec(space, "")
            if codec is not None:
                found.append(Level(PACKED, codec.nbytes(PACKED) + _HEAD, packed))
        for theirs, digest in welcome.cards:
            profile16 = digest.hex()[:16]
            codec = self._codec(space, profile16) if theirs == space.digest else None
            if codec is None:
                continue
            for info in reversed(codec.levels):
                if info.lossy:
                    name = str(LevelName(info.name, profile16))
                    seconds = lossy * (JOINT_WORK if work_of(info.name) == "joint" else 1)
                    found.append(Level(name, codec.nbytes(info.name) + _HEAD, seconds))
        return tuple(found)

    def _codec(self, space: ModelSpace, profile16: str) -> Codec | None:
        """Return the codec with the profile of that name ("": none); None if the profile is not here (yet)."""
        name = space.digest, profile16
        with self._lock:
            codec = self._codecs.get(name)
        if codec is not None:
            return codec
        try:
            profile = self._profiles.find(space, profile16) if profile16 else None
            if profile16 and profile is None:
                return None
            codec = Codec(space, profile)
        except (CtxReuseError, OSError):
            return None
        with self._lock:
            self._codecs[name] = codec
            while len(self._codecs) > _CODECS:
                self._codecs.popitem(last=False)
        return codec


class _Peer(NamedTuple):
    link: Link
    estimate: LinkEstimate
    speed: PrefillSpeed


class CloudPool:
    """A `Remote` over the links of an edge. Any thread may call; a cloud that is not connected gets no requests.

    Args:
        links: Each with the estimate that it updates; the caller closes them.
        quarantine: Peers that are left out because of forged blocks (default: in memory).
        seconds: ``seconds(first, last)`` predicts computing the tokens from ``first`` to ``last`` here, to compare
            clouds (None: unknown; then the more blocks the better).
        profiles: Profiles to read lossy blocks with (None: only exact blocks are requested).
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        links: Iterable[tuple[Link, LinkEstimate]],
        *,
        quarantine: Quarantine | None = None,
        seconds: Callable[[int, int], float | None] | None = None,
        profiles: ProfileStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = {link.name: _Peer(link, estimate, PrefillSpeed()) for link, estimate in links}
        self.quarantine = quarantine or Quarantine(None, seconds=_QUARANTINE_SECONDS)
        self._seconds, self._clock = seconds, clock
        self._levels = _PeerLevels(profiles) if profiles is not None else None
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
        offers: list[Offer] = []
        unsure: list[tuple[_Peer, list[bytes]]] = []
        serving = list(self._serving())
        for peer, welcome in serving:
            keys = self._keys(welcome, space, ids)
            known = peer.link.announced(keys)
            if known is not None and (known <= after or not space.needs_state):
                offers += self._stored(peer, space, known, known, after)
            else:  # announcements say nothing of states
                unsure.append((peer, keys))
        deadline = self._clock() + timeout
        for left, (peer, keys) in zip(range(len(unsure), 0, -1), unsure):
            # A share each, so that one that does not answer leaves time for the others.
            share = max(0.0, deadline - self._clock()) / left
            found = peer.link.match(space.digest, keys, share) if share > 0 else None
            if found is not None:
                states = found.state_blocks if space.needs_state else found.blocks
                offers += self._stored(peer, space, found.blocks, states, after)
        offers += self._would_compute(serving, space, count, after)
        size = space.block_tokens
        priced = self._seconds(after * size, count * size) is not None if self._seconds is not None else False
        return max(offers, key=lambda offer: self._gain(offer, space, after, priced), default=None)

    def _stored(self, peer: _Peer, space: ModelSpace, blocks: int, states: int, after: int) -> list[Offer]:
        useful = (states if space.needs_state else blocks) > after
        return [self._offer(peer, space, blocks, states)] if useful else []

    def _would_compute(
        self, serving: Sequence[tuple[_Peer, Welcome]], space: ModelSpace, count: int, after: int
    ) -> list[Offer]:
        if count - after < _COMPUTE_BLOCKS:
            return []
        offers = []
        for peer, welcome in serving:
            if space.digest in welcome.spaces:
                offer = self._offer(peer, space, count, count, computes=True, delay=peer.speed.delay)
                # Blocks come no faster than they are made.
                made = offer.block_nbytes * peer.speed.tokens_per_second / space.block_tokens
                slower = min(offer.bandwidth, made) if offer.bandwidth else 0.0
                offers.append(msgspec.structs.replace(offer, bandwidth=slower))
        return offers

    def _offer(
        self, peer: _Peer, space: ModelSpace, blocks: int, states: int, computes: bool = False, delay: float = 0.0
    ) -> Offer:
        welcome, estimate = peer.link.welcome, peer.estimate
        levels: tuple[Level, ...] = ()
        if self._levels is not None and welcome is not None:
            levels = self._levels.of(space, welcome, estimate.encoding)
        return Offer(
            peer=peer.link.name,
            source="cloud",
            blocks=blocks,
            state_blocks=states,
            block_nbytes=block_layout(space).nbytes + _HEAD,
            bandwidth=estimate.bandwidth,
            rtt=estimate.rtt,
            computes=computes,
            delay=delay,
            levels=levels,
        )

    def _gain(self, offer: Offer, space: ModelSpace, after: int, known: bool) -> tuple[float, float]:
        """Rank an offer: by seconds saved, or while that is unknown by blocks, then seconds."""
        blocks = (offer.state_blocks if space.needs_state else offer.blocks) - after
        spent = offer.rtt + offer.delay
        spent += blocks * offer.block_nbytes / offer.bandwidth if offer.bandwidth else 0.0
        size = space.block_tokens
        saved = self._seconds(after * size, (after + blocks) * size) if self._seconds is not None and known else None
        if saved is None:
            # Computing elsewhere is a last resort where nothing says how long it would take here.
            return (-1.0 if offer.computes else float(blocks)), -spent
        return saved - spent, -spent

    def fetch(self, offer: Offer, request: FetchRequest) -> Fetch:
        """See `Remote.fetch`; the fetch has ended already if the cloud has disconnected meanwhile."""
        space, ids, first = request.space, as_tokens(request.tokens), request.first
        peer = self._peers.get(offer.peer)
        welcome = peer.link.welcome if peer is not None else None
        if peer is None or welcome is None or self.quarantine.reason(offer.peer) is not None:
            ended = FetchBuffer(request, prefix_keys(space.digest, bytes(16), ids, space.block_tokens))
            ended.end("down")
            return ended
        keys, levels = self._keys(welcome, space, ids), _on_link(request.levels, peer.estimate)
        payload, window = _window(peer.estimate)
        request = msgspec.structs.replace(request, tokens=ids, levels=levels)
        tokens = (len(keys) - first) * space.block_tokens
        done = partial(peer.speed.record, tokens) if offer.computes else None
        return peer.link.fetch(request, keys, payload=payload, window=window, compute=offer.computes, on_done=done)

    def reject(self, offer: Offer, reason: str) -> None:
        """See `Remote.reject`."""
        self.quarantine.add(offer.peer, reason)

    def _serving(self) -> Iterator[tuple[_Peer, Welcome]]:
        for name, peer in self._peers.items():
            welcome = peer.link.welcome
            if peer.link.state == "up" and welcome is not None and self.quarantine.reason(name) is None:
                yield peer, welcome

    def _keys(self, welcome: Welcome, space: ModelSpace, ids: Tokens) -> list[bytes]:
        """Return the keys of the whole blocks of a context on one link."""
        name = welcome.salt, space.digest, ids.tobytes()
        with self._lock:
            keys = self._chains.get(name)
            if keys is not None:
                self._chains.move_to_end(name)
                return keys
        keys = prefix_keys(space.digest, welcome.salt, ids, space.block_tokens)
        with self._lock:
            self._chains[name] = keys
            while len(self._chains) > _CHAINS:
                self._chains.popitem(last=False)
        return keys


def _on_link(request: LevelRequest, estimate: LinkEstimate) -> LevelRequest:
    """Adapt a request to the link: it takes half of a round trip to get there, and each byte half of one back."""
    if not request.levels:
        return LevelRequest()
    deadline = max(1, request.deadline_ms - int(1000 * estimate.rtt)) if request.deadline_ms else 0
    return msgspec.structs.replace(
        request, levels=request.levels[:MAX_LEVELS], bandwidth=int(estimate.bandwidth), deadline_ms=deadline
    )


def _window(estimate: LinkEstimate) -> tuple[int, int]:
    """Return the bytes per payload and payloads on their way: some 50 ms of the link each, two round trips together."""
    if not estimate.bandwidth:
        return 256 << 10, 16
    payload = int(min(max(estimate.bandwidth * 0.05, 64 << 10), 4 << 20))
    return payload, int(min(max(2 * estimate.bandwidth * estimate.rtt / payload + 4, 8), 128))
