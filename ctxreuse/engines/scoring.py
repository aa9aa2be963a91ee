"""Log-probabilities of tokens that are given: how likely the model finds a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ctxreuse.engines.sampling import log_softmax

if TYPE_CHECKING:
    from ctxreuse.engines.base import Context, Engine, Logits
    from ctxreuse.identity.keys import Tokens

__all__ = ["ScoringEngine", "TokenScores", "score_logits", "score_tokens"]


class TokenScores(NamedTuple):
    """Of n tokens, each after those before it: float32 [n] log-probabilities; int32 [n] ranks, 1 is the likeliest; and
    the likeliest in each place, best first: ids int32 [n, top], log-probabilities float32 [n, top]."""

    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]

    @classmethod
    def joined(cls, parts: list[TokenScores]) -> TokenScores:
        """The scores of consecutive tokens as one."""
        return cls(*(np.concatenate(column) for column in zip(*parts)))


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that can tell the logits after each token of a pass, not after the last one only."""

    def score(self, context: Context, tokens: Tokens, targets: Tokens, top: int) -> TokenScores:
        """Append ``tokens`` to the context, and return the scores of ``targets``: of each what the model thinks of it
        after the token in the same place. Raises what `Engine.prefill` raises."""
        ...


def score_tokens(engine: Engine, context: Context, tokens: Tokens, targets: Tokens, top: int) -> TokenScores:
    """As `ScoringEngine.score`; of an engine that is none token by token, as slowly as it decodes."""
    if isinstance(engine, ScoringEngine):
        return engine.score(context, tokens, targets, top)
    rows = [engine.prefill(context, tokens[i : i + 1]) for i in range(len(tokens))]
    return TokenScores.joined([score_logits(row, int(target), top) for row, target in zip(rows, targets)])


def score_logits(logits: Logits, target: int, top: int) -> TokenScores:
    """Return the scores of one token; ``logits``: float32 [vocab] in its place."""
    found = log_softmax(logits)
    best = np.argpartition(found, -top)[-top:] if top else np.zeros(0, np.intp)
    best = best[np.lexsort((best, -found[best]))]
    rank = 1 + np.count_nonzero(found > found[target])
    return TokenScores(
        found[target : target + 1],
        np.array([rank], np.int32),
        best.astype(np.int32)[None, :],
        found[best].astype(np.float32)[None, :],
    )
