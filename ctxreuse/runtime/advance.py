"""Computing tokens with stops where another context may branch off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctxreuse.keys import Tokens

if TYPE_CHECKING:
    from ctxreuse.engines.base import Engine, Live, Logits

__all__ = ["advance"]


def advance(engine: Engine, live: Live, tokens: Tokens, branches: Sequence[int]) -> Logits:
    """Append ``tokens`` to ``live`` and return the logits after the last one.

    A model with states can be resumed only where they were kept, and the engine keeps them at the last block boundary
    of each run. So the run is cut at each of ``branches`` (positions in the context, such as the ends of turns) that
    has a boundary of its own: a fork from there then finds one, and not only the end of this prompt does.
    """
    start, end, size = live.n, live.n + len(tokens), engine.space.block_tokens
    if engine.space.needs_state:
        for at in sorted(set(branches)):
            if at < end and at // size > live.n // size:
                engine.prefill(live, tokens[live.n - start : at - start])
    return engine.prefill(live, tokens[live.n - start :])
