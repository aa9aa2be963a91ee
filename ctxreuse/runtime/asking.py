"""At which levels a fetch asks for blocks, and what it makes of those that came."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from ctxreuse.block import BlockView, parse
from ctxreuse.levels import fits
from ctxreuse.runtime.remote import Ask

if TYPE_CHECKING:
    from ctxreuse.cost import Decision, Level
    from ctxreuse.engines.base import Engine
    from ctxreuse.runtime.remote import Fetch, Offer

__all__ = ["Asked", "finest", "usable_levels", "wish"]


class Asked(TypedDict, total=False):
    """What `Remote.fetch` is told of levels, if anything is to be told."""

    ask: Ask


def usable_levels(engine: Engine, offer: Offer, lossy: str | None) -> tuple[Level, ...]:
    """Of the levels that a peer offers those that ``lossy`` allows and this engine can read."""
    codec = engine.codec if offer.levels else None
    if codec is None:
        return ()
    return tuple(level for level in offer.levels if fits(level.name, lossy) and codec.knows(level.name))


def wish(levels: tuple[Level, ...], decision: Decision, block_tokens: int) -> Asked:
    """Everything that is allowed, by when it has to be here, and how much of it will be used.

    A refinement is worth asking for where the decision is for a lossy level: whoever uses the context next has the
    finer numbers.
    """
    if not levels:
        return {}
    names = tuple(level.name for level in levels)
    lossy = not fits(decision.level, None)
    return {"ask": Ask(names, decision.within, -(-decision.tokens // block_tokens), lossy)}


def finest(engine: Engine, fetch: Fetch, count: int) -> list[BlockView]:
    """The last ``count`` blocks of a fetch, merged with the refinements that are here. Raises FormatError."""
    views, codec = list(fetch.views(count)), engine.codec
    for i, more in enumerate(fetch.refinements(count)):
        if more is not None and codec is not None:
            views[i] = parse(codec.merge(views[i], more))
    return views
