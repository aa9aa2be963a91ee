"""A remote whose blocks come at one level and no other, to measure that level."""

from __future__ import annotations

import msgspec

from ctxreuse.block.levels import EXACT
from ctxreuse.bus.remote import Fetch, FetchRequest, Offer, Remote
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["Single"]


class Single:
    """See `ctxreuse.bus.remote.Remote`: ``remote``, of whose levels only ``level`` (without card) is offered.

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

    def fetch(self, offer: Offer, request: FetchRequest) -> Fetch:
        """See `Remote.fetch`."""
        levels = request.levels
        if levels.levels:
            levels = msgspec.structs.replace(levels, deadline_ms=1, refine=False)
        return self._remote.fetch(offer, msgspec.structs.replace(request, levels=levels))

    def reject(self, offer: Offer, reason: str) -> None:
        """See `Remote.reject`."""
        self._remote.reject(offer, reason)
