"""The drafts of one runtime's answers: which requests have them, and what is learnt from each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxreuse.speculate import AnswerDrafter, DraftMemory, DraftPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.runtime.request import Request
    from ctxreuse.speculate import PassCosts

__all__ = ["Drafting"]


class Drafting:
    """Makes drafters. Any thread may call."""

    def __init__(
        self, space: ModelSpace, costs: PassCosts, keys: Callable[[Tokens, Sequence[bytes]], list[bytes]]
    ) -> None:
        """``keys``: the prefix keys of tokens, of which the first are known."""
        self.memory, self._policy = DraftMemory(), DraftPolicy(costs)
        self._space, self._keys = space, keys

    @property
    def refused(self) -> str:
        """Why no answer of this model can be drafted; "": it can."""
        return "state" if self._space.needs_state else ""

    def begin(self, request: Request, sampling: SamplingParams) -> AnswerDrafter | None:
        """Return the drafter of an answer to a request; None: it is not to be drafted."""
        if self.refused or sampling.speculate == "off":
            return None
        self.memory.learn(request.caller, request.ids, request.keys, self._space.block_tokens)
        return AnswerDrafter(self._policy, self.memory, request.caller, request.ids, sampled=sampling.temperature > 0)

    def end(self, request: Request, tokens: Tokens) -> None:
        """Learn a context whose answer has ended; ``tokens``: prompt and answer."""
        if not self.refused:
            keys, size = self._keys(tokens, request.keys), self._space.block_tokens
            self.memory.learn(request.caller, tokens, keys, size, len(request.ids))
