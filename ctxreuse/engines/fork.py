"""Contexts that continue one context in different ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ctxreuse.block.format import parse
from ctxreuse.errors import CtxReuseError, EngineDiedError
from ctxreuse.identity.keys import KEY_BYTES, ROOT

if TYPE_CHECKING:
    from ctxreuse.engines.base import Context, Engine

__all__ = ["ForkingEngine", "fork_context"]


#: Nobody looks for the partial block of a context under its key.
_PARTIAL = b"\xff" * KEY_BYTES


@runtime_checkable
class ForkingEngine(Protocol):
    """An engine that can copy a context, or let others share its rows."""

    def fork(self, context: Context, count: int, reserve: int = 0) -> list[Context]:
        """Return ``count`` contexts with the tokens and the very K and V of ``context``, or of its leading part, each
        with room for ``reserve`` tokens in all; what is done to one of them changes no other.

        Raises EngineError, and what `Loading.wait` raises."""
        ...


def fork_context(
    engine: Engine, context: Context, keys: Sequence[bytes], count: int, reserve: int = 0
) -> list[Context]:
    """Return ``count`` contexts that begin as ``context`` does, each with room for ``reserve`` tokens in all.

    An engine that is no `ForkingEngine` loads the blocks (``keys`` of the whole ones) of it into each. What is missing
    then, after the last state, the caller computes: all of it where the context's rows are no blocks. Raises what
    `Engine.new_context` raises.
    """
    try:
        if isinstance(engine, ForkingEngine):
            return engine.fork(context, count, reserve)
        return _copies(engine, context, keys, count, reserve)
    except EngineDiedError:
        raise
    except CtxReuseError:
        return [engine.new_context(reserve) for _ in range(count)]


def _copies(engine: Engine, context: Context, keys: Sequence[bytes], count: int, reserve: int) -> list[Context]:
    size, state = engine.space.block_tokens, None
    blocks = context.n // size
    if engine.space.needs_state:
        blocks = max((at for at in context.states if at % size == 0), default=0) // size
        if blocks:
            parent = keys[blocks - 2] if blocks > 1 else ROOT
            state = parse(engine.export_state(context, keys[blocks - 1], parent, blocks * size))
    last_partial = not engine.space.needs_state and context.n % size > 0
    names = [*keys[:blocks], _PARTIAL] if last_partial else keys[:blocks]
    views = [parse(one) for one in engine.export(context, names, ROOT, 0, last_partial=last_partial)]
    found = []
    for _ in range(count):
        one = engine.new_context(reserve)
        if views:
            engine.load(one, views, state).wait()
        found.append(one)
    return found
