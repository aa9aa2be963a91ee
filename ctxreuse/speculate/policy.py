"""How long a draft should be: as long as the tokens that it probably saves are worth more than checking them costs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from ctxreuse.speculate.costs import PassCosts

__all__ = ["GUESS", "MODEL", "Confidence", "DraftLedger", "DraftPolicy", "DraftPrice", "LearntRates", "PassLoad"]

#: A draft must promise this much more of tokens a second.
_MARGIN = 1.05
#: Drafts that are wrong may cost this share of an answer's time, and so many passes of it, which drafts of all answers
#: must have earned since one lost them.
_LOSS, _FREE = 0.015, 3.0
#: Passes after which one without a draft is made, to know what that costs now.
_STALE = 64
#: Tokens that an expectation from elsewhere counts for, in all answers and in one; tokens that are remembered.
_PRIOR, _SHARED, _MEMORY = 3.0, 24.0, 1024.0
#: The least match of each class of matches, and the least share of each class of shares.
_MATCHES, _SHARES = (3, 5, 8, 16, 32), (0.0, 0.5, 0.8, 0.999)
#: What a draft model is taken for, before it was tried.
_GUESSED = 0.6
#: What a draft model computes of a prompt must promise so many times as much in an answer, which is taken to have so
#: many tokens; of those that ended, the newest one's share in what is expected of others.
_WORTH, _TOKENS, _NEWEST = 2.0, 128.0, 0.1
#: Tokens beyond the best length of what a model may draft that are looked at.
_BEYOND = 4
#: Stands for the tokens that match, where a model drafts: its `Confidence.share` is the probability that it gives.
MODEL = -1


class Confidence(NamedTuple):
    """What is known of one token of a draft: tokens that match before the draft (`MODEL`: a model drafts it), its
    share, and what is forced."""

    matched: int
    share: float
    forced: bool = False


#: A token that a model is yet to draft.
GUESS = Confidence(MODEL, -1.0)


class DraftPrice(NamedTuple):
    """Seconds that drafting takes: before the first token, and for each."""

    begin: float = 0.0
    each: float = 0.0


_NOTHING = DraftPrice()


class PassLoad(NamedTuple):
    """What an engine's pass holds beside an answer: contexts that decode, tokens of their drafts, and prefills."""

    contexts: int = 0
    drafted: int = 0
    prefill: bool = False


#: Tokens of drafts that are alike: the class of the match, that of the share, and whether the answer is drawn.
_Kind: TypeAlias = tuple[int, int, bool]


#: Kinds of tokens, and of each how many were tried and right.
LearntRates: TypeAlias = list[tuple[_Kind, float, float]]


class _Rates:
    """Tokens that were tried, and of these right, by class."""

    def __init__(self) -> None:
        self.tried: dict[_Kind, float] = {}
        self.right: dict[_Kind, float] = {}

    def observe(self, kind: _Kind, right: bool) -> None:
        tried = self.tried.get(kind, 0.0)
        keep = _MEMORY / (_MEMORY + 1) if tried >= _MEMORY else 1.0
        self.tried[kind] = tried * keep + 1
        self.right[kind] = self.right.get(kind, 0.0) * keep + right

    def rate(self, kind: _Kind, prior: float, weight: float) -> float:
        return (self.right.get(kind, 0.0) + weight * prior) / (self.tried.get(kind, 0.0) + weight)


class DraftLedger:
    """What drafts gained and lost in one answer: those from texts, or those of a model.

    Attributes:
        sampled: the answer is drawn, not greedy: the same draft is right less often.
        model: a model makes the drafts.
        saved: seconds that drafts saved, less what making and checking them took.
        begun: of these, those that a draft model took for the prompt; it may draft on to earn them.
        seconds: of all passes so far; of each its share, where others were in it.
    """

    def __init__(self, *, sampled: bool = False, model: bool = False) -> None:
        self.sampled, self.model = sampled, model
        self.saved = self.seconds = self.begun = 0.0
        self.rates = _Rates()


class DraftPolicy:
    """One for an engine; learns from all answers. Thread-safe."""

    def __init__(self, costs: PassCosts) -> None:
        self.costs = costs
        self._lock = threading.Lock()
        #: Passes that drafts may lose: those from texts, and those of a model.
        self._free = {False: _FREE, True: _FREE}
        #: Passes that a draft model took for prompts and has not earned yet.
        self._begun = 0.0
        #: Tokens that an answer has.
        self._tokens = _TOKENS
        self._rates = _Rates()

    def dump(self) -> LearntRates:
        """Return how often which tokens were right, for `restore` after a restart."""
        with self._lock:
            return [(kind, tried, self._rates.right.get(kind, 0.0)) for kind, tried in self._rates.tried.items()]

    def restore(self, rates: LearntRates) -> None:
        """Take what `dump` gave; what cannot be counts is left out."""
        with self._lock:
            for kind, tried, right in rates:
                if 0 <= right <= tried <= _MEMORY + 1:
                    self._rates.tried[kind], self._rates.right[kind] = tried, right

    def length(
        self, draft: Sequence[Confidence], load: PassLoad, ledger: DraftLedger, ahead: int = 0
    ) -> tuple[int, str]:
        """Return how many of a draft's tokens are to be checked, and why not more: ``""``, ``cost`` (they would cost
        more than they promise), ``lost`` (if they were wrong, drafts would have lost more than they may) or ``unknown``
        (the engine's costs are not known yet).

        ``ahead``: tokens that the engine has computed by itself when the draft is there, as it is a round trip away:
        they save nothing, and cost nothing.
        """
        return self.best(draft, load, ledger, ahead)[:2]

    def best(
        self,
        draft: Sequence[Confidence],
        load: PassLoad,
        ledger: DraftLedger,
        ahead: int = 0,
        price: DraftPrice = _NOTHING,
    ) -> tuple[int, str, float]:
        """See `length`; and how many times as many tokens a second it promises. ``price``: of tokens that are yet to be
        drafted."""
        contexts = load.contexts + 1
        plain = self.costs.seconds(contexts)
        if plain is None or not self.costs.known(contexts) or self.costs.since_plain > _STALE:
            return 0, "unknown", 1.0
        # What this one may lose: no more than all drafts may, a share of that where others draft too.
        free = max(self._free[ledger.model], 0.0) * plain * 2 / (1 + contexts)
        most = ledger.saved + ledger.begun + _LOSS * ledger.seconds + free
        base = self.costs.seconds(contexts + load.drafted) or plain
        tokens, expected, right = contexts + load.drafted / 2, 0.0, 1.0
        best, length, reason = _MARGIN, 0, "cost"
        for count, one in enumerate(draft, 1):
            right *= self.chance(one, ledger)
            if count <= ahead:
                continue
            expected += right
            cost = (self.costs.seconds(contexts + load.drafted + count - ahead) or base) + price.each * count
            gain = (1 + expected / tokens) / max(cost / base, 1.0)
            if gain > best:
                if cost - base > most:
                    reason = "lost"
                    break
                best, length = gain, count
            elif price.each and count > length + _BEYOND:
                break
        return length, "" if length == len(draft) else reason, best if length else 1.0

    def begins(self, seconds: float, gain: float, left: int, load: PassLoad, ledger: DraftLedger) -> bool:
        """Return True if it is worth so many ``seconds`` of a draft model that ``left`` tokens of an answer may come
        ``gain`` times as fast: it is little, or promises much more, and what it took before is earned."""
        plain = self.costs.seconds(load.contexts + 1)
        if plain is None or self._free[ledger.model] <= 0:
            return False
        share = plain / (load.contexts + 1)
        promised = min(left, self._tokens) * share * (1 - 1 / gain)
        return seconds < share / 2 or (self._begun <= _FREE and seconds * _WORTH < promised)

    def goes_on(self, drafted: Sequence[Confidence], load: PassLoad, ledger: DraftLedger, price: DraftPrice) -> bool:
        """Return True if one more token is worth drafting behind those that were."""
        rows = load.contexts + 1 + load.drafted + len(drafted)
        now, more = self.costs.seconds(rows), self.costs.seconds(rows + 1)
        if now is None or more is None:
            return False
        tokens, right = load.contexts + 1 + load.drafted / 2, 1.0
        for one in drafted:
            right *= self.chance(one, ledger)
            tokens += right
        right *= self.chance(GUESS, ledger)
        return right / tokens > (max(more - now, 0.0) + price.each) / (now + price.each * len(drafted))

    def ended(self, tokens: int) -> None:
        """Note that an answer had so many tokens: for short ones no long prompt is worth a draft model's time."""
        with self._lock:
            self._tokens += _NEWEST * (tokens - self._tokens)

    def chance(self, one: Confidence, ledger: DraftLedger) -> float:
        """Return how probably a token of a draft is right, if those before it are."""
        kind, prior = _kind(one, ledger), one.share * one.matched / (one.matched + 2)
        if one.matched == MODEL:
            prior = one.share if one.share >= 0 else _GUESSED
        with self._lock:
            shared = self._rates.rate(kind, prior, _PRIOR)
        return ledger.rates.rate(kind, shared, _SHARED)

    def observe(self, tried: Sequence[Confidence], right: int, ledger: DraftLedger) -> None:
        """Learn from tokens of a draft of which it is known what came in their place; the first ``right`` did."""
        for at, one in enumerate(tried[: right + 1]):
            for kind in {_kind(one, ledger), _kind(GUESS, ledger)} if one.matched == MODEL else (_kind(one, ledger),):
                with self._lock:
                    self._rates.observe(kind, at < right)
                ledger.rates.observe(kind, at < right)

    def settle(
        self,
        ledger: DraftLedger,
        seconds: float,
        load: PassLoad,
        drafted: int,
        accepted: int,
        making: DraftPrice = _NOTHING,
    ) -> None:
        """Note a pass of an answer: its ``seconds``, what else was in it, the answer's own draft, and what ``making``
        that took (``each``: all its tokens together)."""
        share, saved = seconds / (load.contexts + 1), -making.each
        ledger.seconds += share
        ledger.begun += making.begin
        plain = self.costs.seconds(load.contexts + 1)
        if plain is not None and drafted and not load.prefill:
            extra = max(seconds - plain, 0.0) * drafted / (drafted + load.drafted)
            saved += accepted * plain / (load.contexts + 1) - extra
        ledger.saved += saved - making.begin
        if plain is None or (load.prefill and not saved):
            return
        with self._lock:
            self._free[ledger.model] = min(self._free[ledger.model] + (_LOSS * share + saved) / plain, _FREE)
            if ledger.model:
                self._begun = max(self._begun + (making.begin - max(saved, 0.0) - _LOSS * share) / plain, 0.0)


def _kind(one: Confidence, ledger: DraftLedger) -> _Kind:
    if one.forced:
        return -1, 0, ledger.sampled
    if one.matched == MODEL:
        return -2, sum(one.share >= least for least in _SHARES), ledger.sampled
    matches, shares = (sum(one.matched >= least for least in _MATCHES), sum(one.share >= least for least in _SHARES))
    return matches, shares, ledger.sampled
