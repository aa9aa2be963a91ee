"""The drafts of one answer: from its own text, from what its caller said before, of a model, and from its grammar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ctxreuse.speculate.policy import GUESS, Confidence, DraftLedger, DraftPolicy, DraftPrice, PassLoad
from ctxreuse.speculate.suffix import DEPTH, Continuation, SuffixIndex

if TYPE_CHECKING:
    from ctxreuse.constrain import Constraint
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.speculate.memory import DraftMemory

__all__ = ["MOST", "AnswerDraft", "AnswerDrafter", "Drafter", "TextDrafter", "make_draft"]

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


class Drafter(Protocol):
    """Says how one answer may go on, a token or several at a call. Not thread-safe.

    Attributes:
        seconds: what its calls took, together.
    """

    seconds: float

    def price(self, history: Tokens) -> DraftPrice:
        """Return what drafting behind ``history`` would take."""
        ...

    def draft(self, history: Tokens, ahead: Tokens, most: int) -> Continuation:
        """Return what may follow ``history`` (prompt and answer) and what was drafted ``ahead`` of it: up to ``most``
        tokens, as many as it finds at once; none: it knows nothing."""
        ...


class TextDrafter:
    """A `Drafter` of the answer's own text and what its caller said before: all tokens at once, in microseconds."""

    def __init__(self, memory: DraftMemory, caller: str, history: Tokens) -> None:
        """``history``: the prompt."""
        self._memory, self._caller = memory, caller
        self._own = SuffixIndex(_OWN)
        self._own.add(history[-DEPTH:])
        self._known = len(history)
        self.seconds = 0.0

    def price(self, history: Tokens) -> DraftPrice:
        """See `Drafter.price`: too little to count."""
        return DraftPrice()

    def draft(self, history: Tokens, ahead: Tokens, most: int) -> Continuation:
        """See `Drafter.draft`; learns the answer so far."""
        self._own.add(history[self._known :], begins=False)
        self._known = len(history)
        tail = np.concatenate([history[-DEPTH:], ahead])[-DEPTH:]
        found, shared = self._own.draft(tail, most), self._memory.index(self._caller)
        if shared is not None:
            other = shared.draft(tail, most)
            if other.matched > found.matched or not len(found.ids):
                found = other
        return found


def make_draft(
    drafter: Drafter,
    history: Tokens,
    ahead: Tokens,
    most: int,
    constraint: Constraint | None,
    stops: Collection[int] = (),
    goes_on: Callable[[Sequence[Confidence]], bool] = lambda known: False,
) -> tuple[AnswerDraft, str]:
    """Return how an answer may go on by its grammar and a drafter, and why no further; "": nothing is known against it.

    ``history``, ``ahead``, ``most``: see `Drafter.draft`; ``stops``: tokens that end the answer: what a text says
    behind one was another's turn; ``goes_on``: whether more is to be drafted behind this.
    """
    ids = constraint.forced(most) if constraint is not None else _NONE
    known = [Confidence(DEPTH, 1.0, forced=True)] * len(ids)
    while len(ids) < most:
        found = drafter.draft(history, np.concatenate([ahead, ids]), most - len(ids))
        ids = np.concatenate([ids, found.ids])
        known += [Confidence(found.matched, float(share)) for share in found.shares]
        end = next((at for at, token in enumerate(ids.tolist(), 1) if token in stops), 0)
        if end:
            ids, known = ids[:end], known[:end]
            break
        if not len(found.ids) or not goes_on(known):
            break
    if constraint is not None and len(ids):
        allowed = constraint.follows(ids)
        if allowed < len(ids):
            return AnswerDraft(ids[:allowed], known[:allowed]), "grammar"
    return AnswerDraft(ids, known), "" if len(ids) else "match"


class AnswerDrafter:
    """Drafts for one answer: from texts, or where that promises more, of a model. Not thread-safe.

    Attributes:
        drafted, accepted: tokens of drafts that were checked, and of these right.
        drafted_by_model, accepted_by_model: of these, those that a model drafted.
        short: how often drafts were short or missing, by reason: ``match`` (nothing was said before that goes on so),
            ``grammar``, ``end`` (of the tokens that the answer may have), and those of `DraftPolicy.length`.
        cleared: see `DraftMemory`: when it began.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        memory: DraftMemory,
        caller: str,
        history: Tokens,
        *,
        sampled: bool = False,
        model: Drafter | None = None,
        stops: Collection[int] = (),
    ) -> None:
        """``history``: the prompt; ``sampled``: the answer is drawn, not greedy; ``stops``: see `make_draft`."""
        self._policy, self.cleared, self._stops = policy, memory.cleared, stops
        self._texts, self.model = TextDrafter(memory, caller, history), model
        self._from_texts = self._from_model = AnswerDraft(_NONE, [])
        self._checked, self._modelled, self._making = 0, False, DraftPrice()
        self._ledgers = DraftLedger(sampled=sampled), DraftLedger(sampled=sampled, model=True)
        self.short = Counter[str]()
        self.drafted = self.accepted = self.drafted_by_model = self.accepted_by_model = 0

    @property
    def saved(self) -> float:
        """Seconds that drafts saved, less what making and checking them took."""
        return sum(ledger.saved for ledger in self._ledgers)

    def next(self, history: Tokens, left: int, load: PassLoad, constraint: Constraint | None = None) -> Tokens:
        """Return what may follow ``history`` (prompt and answer so far), int32 [n]; ``left``: tokens at most."""
        most, reason, gain = min(left, MOST), "end", 1.0
        self._from_texts = self._from_model = AnswerDraft(_NONE, [])
        self._checked, self._modelled, self._making = 0, False, DraftPrice()
        if most > 0:
            self._from_texts, reason = make_draft(self._texts, history, _NONE, most, constraint, self._stops)
            if self._from_texts.confidences:
                self._checked, shorter, gain = self._policy.best(self._from_texts.confidences, load, self._ledgers[0])
                reason = shorter or reason
            if self.model is not None:
                refused = self._ask(self.model, history, left, load, constraint, gain)
                reason = refused if self._modelled or not self._checked else reason
        if reason:
            self.short[reason] += 1
        return (self._from_model if self._modelled else self._from_texts).ids[: self._checked]

    def _ask(
        self, model: Drafter, history: Tokens, left: int, load: PassLoad, constraint: Constraint | None, least: float
    ) -> str:
        """Let the model draft, if that promises more than ``least`` times the tokens; returns why not, or no more."""
        policy, ledger, price = self._policy, self._ledgers[1], model.price(history)
        count, reason, gain = policy.best([GUESS] * min(left, MOST), load, ledger, price=price)
        if not count or gain <= least:
            return reason or "cost"
        if not policy.begins(price.begin, gain, left, load, ledger):
            return "cost"
        before = model.seconds
        self._from_model, why = make_draft(
            model,
            history,
            _NONE,
            count,
            constraint,
            self._stops,
            lambda known: policy.goes_on(known, load, ledger, price),
        )
        took = model.seconds - before
        self._making = DraftPrice(min(price.begin, took), took - min(price.begin, took))
        length, shorter, gain = policy.best(self._from_model.confidences, load, ledger)
        if length and gain > least:
            self._checked, self._modelled = length, True
        return shorter or why or reason

    def checked(self, came: Sequence[int], seconds: float, load: PassLoad) -> None:
        """Note which tokens ``came`` in the place of the last draft, those that were accepted and one more;
        ``seconds``: of the pass, in which ``load`` was beside it."""
        accepted = max(len(came) - 1, 0)
        self.drafted += self._checked
        self.accepted += accepted
        if self._modelled:
            self.drafted_by_model += self._checked
            self.accepted_by_model += accepted
        for draft, ledger in zip((self._from_texts, self._from_model), self._ledgers):
            tried, right = draft.confidences[: len(came)], 0  # more than were checked: what it is worth is learnt so
            while right < len(tried) and draft.ids[right] == came[right]:
                right += 1
            self._policy.observe(tried, right, ledger)
            if not ledger.model:
                mine = not self._modelled
                self._policy.settle(ledger, seconds, load, self._checked * mine, accepted * mine)
            elif self.model is not None:
                mine = self._modelled
                self._policy.settle(ledger, seconds, load, self._checked * mine, accepted * mine, self._making)
