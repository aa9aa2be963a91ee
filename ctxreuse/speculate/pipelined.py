"""Drafts for an answer that another node decodes: they are sent ahead of its verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from ctxreuse.identity.keys import Tokens, common_prefix
from ctxreuse.speculate.drafter import MOST, TextDrafter, make_draft
from ctxreuse.speculate.policy import Confidence, DraftLedger, DraftPolicy, PassLoad

if TYPE_CHECKING:
    from ctxreuse.speculate.memory import DraftMemory

__all__ = ["PipelinedDrafter"]

#: Tokens that are under way at most, whatever the round trip.
_UNDER_WAY = 512
_NONE = np.zeros(0, "<i4")


class PipelinedDrafter:
    """Drafts for one answer. Not thread-safe.

    What was sent is taken for right until a verdict says otherwise, so the next draft goes on behind it; what was
    drafted beyond a wrong token is dropped. A draft that is shorter than it could be is the last until its verdict.

    Attributes:
        drafted, accepted, short, cleared: see `AnswerDrafter`.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        memory: DraftMemory,
        caller: str,
        history: Tokens,
        *,
        sampled: bool = False,
        drafts: bool = True,
        stops: Collection[int] = (),
    ) -> None:
        """``policy``: learns what passes of the other node cost; ``history``: the prompt; ``drafts``: if false, none
        are made; ``stops``: tokens that end the answer."""
        self._policy, self.cleared, self._stops = policy, memory.cleared, stops
        self._texts = TextDrafter(memory, caller, history)
        self._sent, self._confidences = _NONE, list[Confidence]()
        self._drafts = self._goes_on = drafts
        self._ledger, self.short = DraftLedger(sampled=sampled), Counter[str]()
        self.drafted = self.accepted = 0

    @property
    def saved(self) -> float:
        """See `AnswerDrafter.saved`; the seconds are those of the other node."""
        return self._ledger.saved

    def next(self, history: Tokens, left: int, load: PassLoad, rtt: float) -> tuple[int, Tokens]:
        """Return what to send now: tokens, int32 [n], and how many that were sent before are not known to be right.

        Args:
            history: prompt and answer, as far as the verdicts go.
            left: tokens that the answer may have besides.
            load: what else is in the node's passes.
            rtt: seconds of a round trip to it.
        """
        before = len(self._sent)
        plain, longest = self._policy.costs.seconds(load.contexts + 1), self._policy.costs.seconds(MOST)
        # While it checks what was sent, it computes nothing by itself.
        ahead = int(rtt / plain) if plain and not before else 0
        most = min(MOST * (2 + ceil(rtt / longest)) if longest else MOST, _UNDER_WAY, left)
        while self._goes_on and len(self._sent) < most:
            count = min(MOST + ahead, most - len(self._sent))
            draft, reason = make_draft(self._texts, history, self._sent, count, None, self._stops)
            length, shorter = 0, ""
            if draft.confidences:
                length, shorter = self._policy.length(draft.confidences, load, self._ledger, ahead)
            reason = shorter or reason
            if reason:
                self.short[reason] += 1
            self._sent = np.concatenate([self._sent, draft.ids[:length]])
            self._confidences += draft.confidences[:length]
            ended = bool(length) and int(draft.ids[length - 1]) in self._stops
            self._goes_on = bool(length) and not shorter and not ended
            ahead = 0
        return before, self._sent[before:]

    def checked(
        self, came: Tokens, drafted: int, accepted: int, seconds: float = 0.0, load: PassLoad | None = None
    ) -> None:
        """Take a verdict: the tokens that ``came``, and how many of a draft were checked and right; ``seconds``: of the
        pass, in which ``load`` was beside it (None: prompts were, so it says nothing of costs)."""
        right = common_prefix(self._sent, came)
        self._policy.observe(self._confidences[: len(came)], right, self._ledger)
        if right == len(came):
            self._sent, self._confidences = self._sent[right:], self._confidences[right:]
        else:
            self._sent, self._confidences = _NONE, []
        self._goes_on = self._drafts and (self._goes_on or not len(self._sent))
        self.drafted += drafted
        self.accepted += accepted
        if load is not None:
            self._policy.settle(self._ledger, seconds, load, drafted, accepted)
