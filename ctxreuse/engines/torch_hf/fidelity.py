"""Scores of a text under a cache, and their comparison with the scores under an exact one."""

from __future__ import annotations

import numpy as np
import torch

from ctxreuse.engines.base import check_prompt
from ctxreuse.engines.calibration import Fidelity
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.engines.torch_hf.engine import TorchEngine
from ctxreuse.engines.torch_hf.modes import inference
from ctxreuse.identity.keys import Tokens

__all__ = ["Scores", "score", "score_each"]


class Scores:
    """Log-probabilities of the next token at n positions of a text; 4 * n * vocab bytes. Safe for any thread."""

    def __init__(self, logits: torch.Tensor, following: torch.Tensor) -> None:
        self._log = torch.log_softmax(logits.float(), -1)
        self._nll = -float(self._log.gather(1, following[:, None]).mean())
        self._following = following

    @property
    def nll(self) -> float:
        """Nats a token by which the text that follows was unexpected, mean over the positions."""
        return self._nll

    @property
    @inference
    def right(self) -> float:
        """Share of positions at which the token that follows was the most likely one."""
        return float((self._log.argmax(-1) == self._following).double().mean())

    @inference
    def against(self, exact: Scores) -> Fidelity:
        """Compare with ``exact`` scores of the same text and positions."""
        ours, theirs = self._log, exact._log
        # Row by row in pieces: the whole product of a large vocabulary would be another 200 MB.
        kl = [float((b.exp() * (b - a)).sum()) for a, b in zip(ours.split(16), theirs.split(16), strict=True)]
        same = float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
        return Fidelity(max(sum(kl) / len(ours), 0.0), same, self._nll - exact._nll)


@inference
def score(engine: TorchEngine, context: TorchContext, tokens: Tokens) -> Scores:
    """Continue a context by all of ``tokens`` int32 [n + 1] but the last and score each of the n next ones.

    The context grows by n tokens in one forward: drop it or crop it afterwards. Raises what `Engine.prefill` raises.
    """
    ids = torch.from_numpy(check_prompt(engine.space, context.n, tokens).astype(np.int64))
    context.check_usable()
    context.reserve(context.n + len(ids))
    positions = torch.arange(context.n, context.n + len(ids) - 1)
    out = engine.model(
        input_ids=ids[None, :-1], position_ids=positions[None], past_key_values=context.cache, use_cache=True
    )
    context.append(ids[:-1].numpy().astype("<i4"))
    context.finish_load()
    return Scores(out.logits[0], ids[1:])


@inference
def score_each(engine: TorchEngine, context: TorchContext, tokens: Tokens) -> Scores:
    """As `score`, token by token, as answers are generated."""
    logits = [engine.prefill(context, tokens[at : at + 1]) for at in range(len(tokens) - 1)]
    return Scores(torch.from_numpy(np.stack(logits)), torch.from_numpy(tokens[1:].astype(np.int64)))
