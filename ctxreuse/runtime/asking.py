"""At which levels a fetch can ask for blocks, and what it says of its wishes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypedDict

import msgspec

from ctxreuse.cost import Path
from ctxreuse.levels import EXACT, damage, fits
from ctxreuse.runtime.remote import Ask
from ctxreuse.runtime.watch import Expected

if TYPE_CHECKING:
    from ctxreuse.cost import Decision, Level
    from ctxreuse.engines.base import Engine
    from ctxreuse.runtime.remote import Offer, Order

__all__ = ["Asked", "Menu", "usable_levels", "wish"]


class Asked(TypedDict, total=False):
    """What `Remote.fetch` is told of levels, if anything is to be told."""

    ask: Ask


#: Bytes of a block's head at most, in most models.
_HEAD = 4096


class Menu(NamedTuple):
    """At which levels blocks of ``tokens`` tokens can come from a peer; at ``exact`` one has ``raw`` bytes."""

    levels: tuple[Level, ...]
    tokens: int
    raw: float

    @classmethod
    def of(cls, engine: Engine, offer: Offer, lossy: str | None) -> Menu:
        """What the offer's peer can send and ``lossy`` allows."""
        space = engine.space
        raw = offer.block_nbytes or space.token_nbytes * space.block_tokens
        return cls(usable_levels(engine, offer, lossy), space.block_tokens, raw)

    def nbytes(self, level: str) -> float:
        """Expected bytes of a block."""
        return next((one.block_nbytes for one in self.levels if one.name == level), self.raw)

    def expected(self, offer: Offer, level: str, blocks: int, order: Order) -> Expected:
        """How ``blocks`` blocks at ``level`` should come."""
        each = self.nbytes(level)
        making = next((one.seconds for one in self.levels if one.name == level), 0.0)
        if order == "layers" and making:  # all is encoded, and only heads come, before the first layer goes
            return Expected(offer, blocks, int(blocks * each), blocks * making, blocks * _HEAD)
        if making and offer.bandwidth > 0:
            offer = msgspec.structs.replace(offer, bandwidth=min(offer.bandwidth, each / making))
        return Expected(offer, blocks, int(blocks * each), making)

    def path(self, offer: Offer, bandwidth: float) -> Path:
        """What fetching looks like over a link of so many bytes/s."""
        n = self.tokens
        levels = tuple((one.name, one.block_nbytes / n, one.seconds / n) for one in self.levels)
        return Path(self.nbytes(EXACT) / n, bandwidth, offer.rtt, offer.delay, offer.computes, levels)


def usable_levels(engine: Engine, offer: Offer, lossy: str | None) -> tuple[Level, ...]:
    """Of the levels that a peer offers those that ``lossy`` allows and this engine can read."""
    codec = engine.codec if offer.levels else None
    if codec is None:
        return ()
    return tuple(level for level in offer.levels if fits(level.name, lossy) and codec.knows(level.name))


def wish(levels: tuple[Level, ...], decision: Decision, block_tokens: int, order: Order) -> Asked:
    """What is allowed, by when it has to be here, and how much of it will be used.

    Refinements are asked for where all of a lossy level is fetched: they come when nothing else is left to send, and
    whoever uses the context next has the finer numbers.
    """
    if not levels:
        return {}
    # Layers are waited for: time that the peer saves is not to be spent on finer numbers than were priced.
    least = damage(decision.level) if order == "layers" else 0.0
    names = tuple(level.name for level in levels)
    spared = sum(damage(name) < least for name in names)
    # A tail is used as soon as both ends meet, and what would be sent after it never is.
    refine = order == "layers" and not fits(decision.level, None)
    return {"ask": Ask(names, decision.within, -(-decision.tokens // block_tokens), refine, spared)}
