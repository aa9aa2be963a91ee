"""Computing tokens with stops where states are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctxreuse.keys import Tokens

if TYPE_CHECKING:
    from ctxreuse.engines.base import Engine, Live, Logits

__all__ = ["advance"]


def advance(engine: Engine, live: Live, tokens: Tokens, stops: Sequence[int]) -> Logits:
    """Append ``tokens`` to ``live`` and return the logits after the last one.

    A model with states can be resumed only where they were taken, and the engine takes them at the last block boundary
    of each run. So the run is cut at each of ``stops`` (positions in the context) that has a boundary of its own.
    """
    start, end, size = live.n, live.n + len(tokens), engine.space.block_tokens
    if engine.space.needs_state:
        for at in sorted(set(stops)):
            if at < end and at // size > live.n // size:
                engine.prefill(live, tokens[live.n - start : at - start])
    return engine.prefill(live, tokens[live.n - start :])
