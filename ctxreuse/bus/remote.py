"""Other nodes as a runtime sees them: offers of blocks, running fetches, and answers that they decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from ctxreuse.block.format import BlockView
from ctxreuse.bus.protocol.messages import LevelRequest, Verdict, Verify
from ctxreuse.cost.levels import Level
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["Fetch", "FetchRequest", "LevelRequest", "Offer", "Order", "Remote", "Verification", "Verifier"]

#: The order in which parts of the blocks are sent. ``layers``: every head, then layer 0 of all blocks, layer 1, … so
#: that computing what follows can start after the first layer. ``tail``: whole blocks, the last one first, so that the
#: missing front can be computed meanwhile and both ends meet.
Order = Literal["layers", "tail"]


class FetchRequest(msgspec.Struct, frozen=True, eq=False):
    """Consecutive blocks of one context to fetch; it travels whole from the runtime to the link.

    Args:
        space: The model space.
        tokens: int32, of the context from its start to the end of the last block.
        first: The first block.
        order: The order in which their bytes are sent.
        state: Also the states at the end of the last block; in order ``tail`` they come first.
        levels: Levels accepted besides exact; another one ends the fetch with ``level``.
    """

    space: ModelSpace
    tokens: Tokens
    first: int = 0
    order: Order = "layers"
    state: bool = False
    levels: LevelRequest = LevelRequest()


class Offer(msgspec.Struct, frozen=True):
    """The part of a context that one peer can send.

    Args:
        peer: Its name.
        source: The kind of node.
        blocks: Leading blocks of the context that it can send.
        state_blocks: The most of those at whose end it also has the states (``blocks`` where the model needs none).
        block_nbytes: Bytes of one block on the wire.
        bandwidth: The link's estimate in bytes/s (0: not measured yet).
        rtt: Its round trip in seconds.
        computes: The peer would compute the blocks now, front to end; order ``layers`` only.
        delay: Seconds until the first bytes come, beyond the round trip.
        levels: Levels besides ``exact`` that it can send and this node can read.
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


class Fetch(Protocol):
    """Consecutive blocks of one context that are being fetched. Any thread may call.

    Memory of the blocks lives as long as a view of it does.
    """

    @property
    def count(self) -> int:
        """Number of requested blocks."""

    def heads(self, timeout: float) -> Sequence[BlockView]:
        """Wait for the heads of all blocks; returns their views in order, whose planes may still be missing.

        Key, token ids, model space, layout and position are those requested. Raises LinkError after ``timeout``
        seconds, or if the fetch ended early.
        """

    def wait_layer(self, layer: int, timeout: float) -> None:
        """Wait for the planes of ``layer`` of all blocks; compare checksums when copying them.

        Raises LinkError after ``timeout`` seconds or if the fetch ended before.
        """

    def tail(self, least: int = 0, timeout: float = 0.0) -> int:
        """Count the complete blocks at the end, without a gap; waits up to ``timeout`` for ``least`` of them. Never
        raises."""

    def views(self, last: int) -> Sequence[BlockView]:
        """Return views of the last ``last`` blocks, which must be complete (`tail`)."""

    def refinements(self, last: int) -> Sequence[BlockView | None]:
        """Return the refinements of the last ``last`` blocks in order, None for each that is not complete (yet)."""

    def state(self, timeout: float) -> BlockView | None:
        """Wait for the states at the end of the last block; None if not requested, or not complete in time."""

    @property
    def ended(self) -> str | None:
        """None while more may come; then ``""`` (complete) or why it ended early: ``foreign`` if the peer sent heads
        that were not requested, ``level`` for a level that was not allowed; other reasons are not its fault."""

    @property
    def received(self) -> int:
        """Payload bytes received so far."""

    def stop(self) -> None:
        """End the fetch. Idempotent; what has arrived stays."""


class Remote(Protocol):
    """Other nodes. Any thread may call; nothing raises for a peer that is away."""

    def offer(self, space: ModelSpace, tokens: Tokens, *, after: int, timeout: float) -> Offer | None:
        """Return the best offer of ``tokens`` beyond the first ``after`` blocks.

        None if no peer is connected, has more, or answers within ``timeout`` seconds; at once where announcements
        already say that there is nothing.
        """

    def fetch(self, offer: Offer, request: FetchRequest) -> Fetch:
        """Fetch blocks from the offer's peer; returns at once."""

    def reject(self, offer: Offer, reason: str) -> None:
        """Quarantine a peer whose blocks were wrong (``corrupt``, ``audit``, ``foreign``, ``level``)."""


class Verification(Protocol):
    """An answer that a peer decodes while this node drafts it. Any thread may call."""

    @property
    def peer(self) -> str: ...

    @property
    def rtt(self) -> float:
        """Seconds of a round trip to it; 0: not measured yet."""

    @property
    def ended(self) -> str | None:
        """None while verdicts may come, then "" (the answer is whole) or why it ended early."""

    @property
    def ready(self) -> bool:
        """True if `take` would not wait."""

    def take(self, timeout: float) -> Verdict | None:
        """Wait for the next verdict; None at the end, or after ``timeout`` seconds, which end it."""

    def draft(self, start: int, tokens: Tokens) -> None:
        """Say what may follow the answer's first ``start`` tokens; returns at once."""

    def stop(self) -> None:
        """Give it up. Idempotent."""


class Verifier(Protocol):
    """Other nodes that decode answers. Any thread may call; nothing raises for a peer that is away."""

    def verify(self, space: ModelSpace, request: Verify) -> Verification | None:
        """Begin an answer of a peer's model that has the tokenizer of ``space``; ``request`` is in that space, and the
        peer's takes its place. None: no such peer is connected."""
