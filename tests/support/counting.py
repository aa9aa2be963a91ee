"""An engine whose next token is counted from the last one, for what is about passes and not about models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ctxreuse.engines.base import check_prompt
from ctxreuse.errors import CtxReuseError
from support.memory_link import space_of

SPACE = space_of()


def next_token(token: int) -> int:
    """What follows a token."""
    return (token * 7 + 3) % SPACE.vocab_size


class CountingContext:
    def __init__(self) -> None:
        self.tokens = np.zeros(0, "<i4")

    @property
    def n(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return 4 * self.n


class CountingEngine:
    """What `AnswerChecker` needs of an `Engine`."""

    space, batches = SPACE, True

    def new_context(self, reserve: int = 0) -> CountingContext:
        return CountingContext()

    def step(self, batch: Sequence[tuple[Any, Any]], *, limit: int | None, rows: Sequence[int]) -> list[Any]:
        found: list[Any] = []
        for (context, tokens), wanted in zip(batch, rows):
            try:
                ids = check_prompt(self.space, context.n, tokens)
            except CtxReuseError as error:
                found.append(error)
                continue
            taken = ids if wanted > 1 else ids[:limit]
            context.tokens = np.concatenate([context.tokens, taken])
            logits = np.zeros((wanted, self.space.vocab_size), np.float32)
            for row, token in zip(logits, taken[-wanted:]):
                row[next_token(int(token))] = 1.0
            found.append((logits if wanted > 1 else logits[0]) if len(taken) == len(ids) else None)
        return found

    def crop(self, context: CountingContext, n: int) -> bool:
        context.tokens = context.tokens[:n].copy()
        return True
