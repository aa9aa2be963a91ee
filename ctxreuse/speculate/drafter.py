"""The drafts of one answer: from its own text, from what its caller said before, and from its grammar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ctxreuse.speculate.policy import Confidence, DraftLedger, DraftPolicy, PassLoad
from ctxreuse.speculate.suffix import DEPTH, NOTHING, SuffixIndex

if TYPE_CHECKING:
    from ctxreuse.constrain import Constraint
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.speculate.memory import DraftMemory

__all__ = ["MOST", "AnswerDraft", "AnswerDrafter", "Continuations"]

#: Tokens of a draft at most.
MOST = 32
#: Tokens of an answer that its own index keeps.
_OWN = 1 << 14
_NONE = np.zeros(0, "<i4")


class AnswerDraft:
    """Tokens that may follow, int32 [n], and what is known of each."""

    __slots__ = ("confidences", "ids")

    def __init__(self, ids: Tokens, confidences: list[Confidence]) -> None:
        self.ids, self.confidences = ids, confidences


class Continuations:
    """How one answer may go on, by its own text, what its caller said before, and its grammar. Not thread-safe."""

    def __init__(self, memory: DraftMemory, caller: str, history: Tokens) -> None:
        """``history``: the prompt."""
        self._memory, self._caller = memory, caller
        self._own = SuffixIndex(_OWN)
        self._own.add(history[-DEPTH:])
        self._known = len(history)

    def extend(self, history: Tokens) -> None:
        """Learn the answer so far; ``history``: with the prompt."""
        self._own.add(history[self._known :], begins=False)
        self._known = len(history)

    def draft(self, history: Tokens, most: int, constraint: Constraint | None) -> tuple[AnswerDraft, str]:
        """Return how an answer that ends in ``history`` may go on, and why no further; "": nothing is known against
        it."""
        forced = constraint.forced(most) if constraint is not None else _NONE
        tail = history[-DEPTH:]
        if len(forced):
            tail = np.concatenate([tail, forced])[-DEPTH:]
        found = NOTHING
        if len(forced) < most:
            found = self._own.draft(tail, most - len(forced))
            shared = self._memory.index(self._caller)
            if shared is not None:
                other = shared.draft(tail, most - len(forced))
                if other.matched > found.matched or not len(found.ids):
                    found = other
        ids = np.concatenate([forced, found.ids])
        known = [Confidence(DEPTH, 1.0, forced=True)] * len(forced)
        known += [Confidence(found.matched, float(share)) for share in found.shares]
        if constraint is not None and len(ids):
            allowed = constraint.follows(ids)
            if allowed < len(ids):
                return AnswerDraft(ids[:allowed], known[:allowed]), "grammar"
        return AnswerDraft(ids, known), "" if len(ids) else "match"


class AnswerDrafter:
    """Drafts for one answer. Not thread-safe.

    Attributes:
        drafted, accepted: tokens of drafts that were checked, and of these right.
        short: how often drafts were short or missing, by reason: ``match`` (nothing was said before that goes on so),
            ``grammar``, ``end`` (of the tokens that the answer may have), and those of `DraftPolicy.length`.
        ledger: what they gained.
        cleared: see `DraftMemory`: when it began.
    """

    def __init__(
        self, policy: DraftPolicy, memory: DraftMemory, caller: str, history: Tokens, *, sampled: bool = False
    ) -> None:
        """``history``: the prompt; ``sampled``: the answer is drawn, not greedy."""
        self._policy, self.cleared = policy, memory.cleared
        self._texts = Continuations(memory, caller, history)
        self._draft, self._checked = AnswerDraft(_NONE, []), 0
        self.ledger, self.short = DraftLedger(sampled=sampled), Counter[str]()
        self.drafted = self.accepted = 0

    def next(self, history: Tokens, left: int, load: PassLoad, constraint: Constraint | None = None) -> Tokens:
        """Return what may follow ``history`` (prompt and answer so far), int32 [n]; ``left``: tokens at most."""
        self._texts.extend(history)
        most = min(left, MOST)
        draft, reason = AnswerDraft(_NONE, []), "end"
        if most > 0:
            draft, reason = self._texts.draft(history, most, constraint)
        self._draft, self._checked = draft, 0
        if draft.confidences:
            self._checked, shorter = self._policy.length(draft.confidences, load, self.ledger)
            reason = shorter or reason
        if reason:
            self.short[reason] += 1
        return draft.ids[: self._checked]

    def checked(self, came: Sequence[int], seconds: float, load: PassLoad) -> None:
        """Note which tokens ``came`` in the place of the last draft, those that were accepted and one more;
        ``seconds``: of the pass, in which ``load`` was beside it."""
        draft, right = self._draft, 0
        tried = draft.confidences[: len(came)]  # more than were checked: whether a draft is worth it is learnt without
        while right < len(tried) and draft.ids[right] == came[right]:
            right += 1
        accepted = max(len(came) - 1, 0)
        self.drafted += self._checked
        self.accepted += accepted
        self._policy.observe(tried, right, self.ledger)
        self._policy.settle(self.ledger, seconds, load, self._checked, accepted)
