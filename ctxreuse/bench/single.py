"""A remote whose blocks come at one level and no other, to measure that level."""

from __future__ import annotations

import msgspec

from ctxreuse.keys import Tokens
from ctxreuse.levels import EXACT
from ctxreuse.model import ModelSpace
from ctxreuse.runtime.remote import Ask, Fetch, Offer, Order, Remote

__all__ = ["Single"]


class Single:
    """See `ctxreuse.runtime.remote.Remote`: ``remote``, of whose levels only ``level`` (without card) is offered.

    Its blocks are priced as the only ones there are, and asked for in a hurry, so that the peer picks nothing finer.
    """

    def __init__(self, remote: Remote, level: str) -> None:
        self._remote, self._level = remote, level

    def offer(self, space: ModelSpace, tokens: Tokens, *, after: int, timeout: float) -> Offer | None:
        """See `Remote.offer`."""
        offer = self._remote.offer(space, tokens, after=after, timeout=timeout)
        if offer is None:
            return None
        levels = tuple(one for one in offer.levels if one.name.partition("@")[0] == self._level)
        # No level has this many bytes: of two that promise the same, the one that is offered is the quicker.
        nbytes = offer.block_nbytes if self._level == EXACT else 16 * offer.block_nbytes
        return msgspec.structs.replace(offer, levels=levels, block_nbytes=nbytes)

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
        """See `Remote.fetch`."""
        hurry = msgspec.structs.replace(ask, within=1e-3, refine=False) if ask is not None else None
        return self._remote.fetch(offer, space, tokens, first=first, last=last, order=order, state=state, ask=hurry)

    def reject(self, offer: Offer, reason: str) -> None:
        """See `Remote.reject`."""
        self._remote.reject(offer, reason)
