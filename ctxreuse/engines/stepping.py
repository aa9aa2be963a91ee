"""`Engine.step` for engines that run one context after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctxreuse.engines.base import check_prompt, chunk_spans
from ctxreuse.errors import CtxReuseError

if TYPE_CHECKING:
    from ctxreuse.engines.base import Context, Engine, Logits
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.identity.model import ModelSpace

__all__ = ["first_slice", "step_one_by_one"]


def first_slice(space: ModelSpace, start: int, count: int, limit: int | None, chunk: int) -> int:
    """How many of ``count`` tokens from position ``start`` on go into a pass that takes at most ``limit``.

    It ends where a block does, if one does, as a context that is loaded begins there: what follows has the same passes.
    A short continuation from inside a block goes on over its end: what it follows had passes of its own, and one more
    would read all weights for a few tokens.
    """
    size = space.block_tokens
    if start % size and count < size and not space.needs_state:
        return min(count, limit or count)
    _, stop = next(chunk_spans(start, start + count, chunk))
    taken = min(stop - start, limit or count)
    beyond = (start + taken) % size
    return taken - beyond if beyond < taken else taken


def step_one_by_one(
    engine: Engine, batch: Sequence[tuple[Context, Tokens]], limit: int | None, chunk: int
) -> list[Logits | CtxReuseError | None]:
    """See `Engine.step`; each context takes at most ``limit`` tokens, and is cut where a prefill in chunks is."""
    found: list[Logits | CtxReuseError | None] = []
    for context, tokens in batch:
        try:
            ids = check_prompt(engine.space, context.n, tokens)
            taken = first_slice(engine.space, context.n, len(ids), limit, chunk)
            logits = engine.prefill(context, ids[:taken])
            found.append(logits if taken == len(ids) else None)
        except CtxReuseError as error:
            found.append(error)
    return found
