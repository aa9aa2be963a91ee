"""How a runtime asks other nodes for blocks: what a remote offers, and a fetch on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from ctxreuse.block import BlockView
from ctxreuse.cost.levels import Level
from ctxreuse.keys import Tokens
from ctxreuse.model import ModelSpace

__all__ = ["Ask", "Fetch", "Offer", "Order", "Remote"]

#: In which order the parts of the blocks are wanted. ``layers``: every head, then layer 0 of all blocks, layer 1, … so
#: that computing what follows can start after the first layer. ``tail``: whole blocks, the last one first, so that the
#: missing front can be computed meanwhile and both ends meet.
Order = Literal["layers", "tail"]


class Offer(msgspec.Struct, frozen=True):
    """What one peer holds of a context.

    ``blocks``: leading blocks of the context it can send; ``state_blocks``: the largest number of blocks, at most
    ``blocks``, at whose end it also holds the states (equal to ``blocks`` where the model needs none).
    ``block_nbytes``: bytes of one block on the wire. ``bandwidth`` (bytes/s) and ``rtt`` (s) are the link's present
    estimates; ``bandwidth`` is 0 while nothing has been measured. ``computes``: the peer does not hold the blocks but
    would compute them now, front to end; then only the order ``layers`` is asked for. ``delay``: seconds until the
    first bytes come, beyond the RTT. ``levels``: at which it can send blocks besides ``exact``, as far as they can be
    read here.
    """

    peer: str
    source: Literal["edge", "cloud"]
    blocks: int
    state_blocks: int
    block_nbytes: int
    bandwidth: float
    rtt: float
    computes: bool = False
    delay: float = 0.0
    levels: tuple[Level, ...] = ()


class Ask(msgspec.Struct, frozen=True):
    """At which ``levels`` besides ``exact`` blocks may come. The peer picks the least damage of which the ``expect``
    blocks that it sends first (0: all) are here ``within`` seconds from now, after its own round trip (0: no matter
    when). ``refine``: once all is here it goes on with what makes lossy blocks finer (`Fetch.refinements`); the
    ``spared`` first of ``levels`` are only for that, unless one is the quickest."""

    levels: tuple[str, ...] = ()
    within: float = 0.0
    expect: int = 0
    refine: bool = False
    spared: int = 0


class Fetch(Protocol):
    """Consecutive blocks of one context on their way here. Any thread may call.

    Memory of the blocks belongs to the fetch and lives as long as a view of it does.
    """

    @property
    def count(self) -> int:
        """Number of blocks that were asked for."""
        ...

    def heads(self, timeout: float) -> Sequence[BlockView]:
        """Views of all blocks, in order, once every head has arrived; planes may still be missing.

        Key, token ids, model space, layout and position have been compared with what was asked for. Raises LinkError
        after ``timeout`` seconds, or if the fetch ended early or a head was not what was asked for.
        """
        ...

    def wait_layer(self, layer: int, timeout: float) -> None:
        """Return when the planes of ``layer`` are in for all blocks (not verified: who copies them compares checksums).

        Raises LinkError after ``timeout`` seconds or if the fetch ended before.
        """
        ...

    def tail(self, least: int = 0, timeout: float = 0.0) -> int:
        """How many blocks at the end are whole, without a gap; waits up to ``timeout`` until there are ``least``.

        Never raises: a fetch that ended early just stops growing (`ended`).
        """
        ...

    def views(self, last: int) -> Sequence[BlockView]:
        """Views of the last ``last`` blocks, which must be whole (`tail`)."""
        ...

    def refinements(self, last: int) -> Sequence[BlockView | None]:
        """Of the last ``last`` blocks, in order: their refinements, None for each that is not here whole (yet)."""
        ...

    def state(self, timeout: float) -> BlockView | None:
        """The states at the end of the last block, if they were asked for and have arrived whole in time."""
        ...

    @property
    def ended(self) -> str | None:
        """None while more may come; then ``""`` (all is here) or why it ended early: ``foreign`` if the peer sent heads
        that were not asked for, ``level`` if it sent a level that was not allowed, else it is nobody's fault."""
        ...

    @property
    def received(self) -> int:
        """Payload bytes received so far."""
        ...

    def stop(self) -> None:
        """Tell the peer to send no more. Idempotent; what has arrived stays."""
        ...


class Remote(Protocol):
    """Other nodes as a runtime sees them. Any thread may call; nothing here raises for a peer that is away."""

    def offer(self, space: ModelSpace, tokens: Tokens, *, after: int, timeout: float) -> Offer | None:
        """The best that some peer holds of ``tokens`` beyond the first ``after`` blocks.

        None if no peer is connected, none holds more, or none answered within ``timeout`` seconds. At once (without a
        round trip) where what peers announced already says that there is nothing.
        """
        ...

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
        """Ask the offer's peer for blocks ``first`` (inclusive) to ``last`` (exclusive); returns at once.

        ``state``: also for the states at the end of block ``last - 1``; in order ``tail`` they come first. ``ask``: the
        levels at which they may come (None: exact). A peer that sends another one has ended the fetch with ``level``.
        """
        ...

    def reject(self, offer: Offer, reason: str) -> None:
        """Blocks of this peer turned out wrong (``corrupt``, ``audit``, ``foreign``, ``level``): it is quarantined."""
        ...
