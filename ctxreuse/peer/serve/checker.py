"""Decodes answers that peers draft with an engine of this process: all of them in common passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from ctxreuse.bus.protocol.messages import DrawRule, JudgeRule, Verdict, Verify
from ctxreuse.engines.digit import DigitQuestion
from ctxreuse.engines.sampling import Sampler, SamplingParams
from ctxreuse.errors import CtxReuseError, EngineError
from ctxreuse.fair import Turns
from ctxreuse.identity.keys import Tokens, common_prefix, prefix_keys
from ctxreuse.judge import likelihood
from ctxreuse.peer.serve.engine import BURST, resume_stored

if TYPE_CHECKING:
    from ctxreuse.engines.base import Context, Engine, Logits
    from ctxreuse.store.base import Store

__all__ = ["AnswerChecker", "Checked", "sampling_of"]

#: Answers that a pass advances, and tokens of a prompt that go with them.
_TOGETHER, _SLICE = 8, 256
#: Tokens of one draft that a pass checks at most, whatever its peer wants: others wait for the pass.
_WIDEST = 64
#: Tokens of a prompt that may be left where a draft is checked with them.
_WITH_DRAFT = 64
#: Contexts of ended answers that wait for the next one of their conversation: seconds, number, and bytes.
_WAIT, _CONTEXTS, _BYTES = 300.0, 16, 1 << 30


class Checked(NamedTuple):
    """What a pass came to for answer ``number``: a verdict, and whether that was the last; or why the answer failed."""

    number: int
    verdict: Verdict | None
    ended: bool = False
    failed: str = ""


class _Resident(NamedTuple):
    salt: bytes
    context: Context
    at: float


def sampling_of(rule: DrawRule) -> SamplingParams:
    """Return a rule of the link as sampling parameters. Raises ConfigError for values without a meaning."""
    return SamplingParams(**msgspec.structs.asdict(rule))


class _Answer:
    """One answer: ``known`` has the prompt's tokens and its own, ``count`` of them."""

    def __init__(self, number: int, salt: bytes, request: Verify, audited: int, most: int) -> None:
        prompt = np.frombuffer(request.tokens, "<i4")
        self.number, self.salt, self.audited, self.width = number, salt, audited, min(request.width, _WIDEST)
        self.prompt, self.stops = len(prompt), frozenset(request.stops)
        # The last token needs no position, as it is never fed.
        self.known = np.empty(min(len(prompt) + request.count, most + 1), "<i4")
        self.known[: len(prompt)] = prompt
        self.count = len(prompt)
        self.sampler = Sampler(sampling_of(request.rule), len(prompt))
        self.drafted = self.known[:0]
        self.context: Context | None = None
        self.cached = 0
        #: How what it may begin with is judged as a whole, until it was; and whether that is in its next pass.
        self.judge: JudgeRule | None = request.judge if request.draft else None
        self.judging = False

    @property
    def tokens(self) -> Tokens:
        return self.known[: self.count]

    def draft(self, start: int, ids: Tokens) -> None:
        """Take a draft from the answer's token ``start`` on, if it fits to what is known and was drafted before."""
        start += self.prompt
        end = self.count + len(self.drafted)
        if not self.prompt <= start <= end:
            return
        passed = max(self.count - start, 0)
        if passed and not np.array_equal(ids[:passed], self.known[start : start + min(passed, len(ids))]):
            return
        kept = self.drafted[: max(start - self.count, 0)]
        self.drafted = np.concatenate([kept, ids[passed:]])[: len(self.known) - self.count]

    def next(self, question: Callable[[], DigitQuestion]) -> tuple[Tokens, int]:
        """Return the tokens of its next pass, and how many of them are a draft's that is checked."""
        assert self.context is not None
        left = self.tokens[self.context.n :]
        self.judging = self.judge is not None and len(left) <= _WITH_DRAFT
        if self.judge is not None and not self.judging:
            return left[:-1], 0
        if self.judge is not None and self.judge.kind == "digit":
            return np.concatenate([left, self.drafted, question().ids]), 0
        if self.judge is not None:  # its last token is looked up, not fed
            return np.concatenate([left, self.drafted[:-1]]), len(self.drafted) - 1
        checked = 0
        if len(left) <= _WITH_DRAFT:  # the last token that it may have is never fed
            checked = min(self.width, len(self.drafted), len(self.known) - self.count - 1)
        return np.concatenate([left, self.drafted[:checked]]), checked

    def decide(self, logits: Logits, question: Callable[[], DigitQuestion]) -> tuple[float, tuple[int, int, bool]]:
        """Judge the step; returns its score, and what `take` does: all of an accepted step, which ends the answer, else
        the model's own first token, as far as these logits tell it."""
        assert self.judge is not None
        rule, step = self.judge, self.drafted
        self.judge, self.drafted = None, self.drafted[:0]
        score = likelihood(logits, step) if rule.kind == "likelihood" else question().score(np.atleast_2d(logits)[-1])
        if rule.threshold is not None and score >= rule.threshold:
            self.known[self.count : self.count + len(step)] = step
            self.count += len(step)
            return score, (len(step), len(step), True)
        return score, (0, 0, False) if rule.kind == "digit" else self.take(np.atleast_2d(logits)[:1], 0)

    def take(self, logits: Logits, checked: int) -> tuple[int, int, bool]:
        """Draw tokens while they are those of the draft, and one more; returns how many, how many of these were
        drafted, and whether the answer ends."""
        start, ended = self.count, False
        for row in np.atleast_2d(logits):
            token = self.sampler.next(row, self.tokens)
            at = self.count - start
            self.known[self.count] = token
            self.count += 1
            ended = token in self.stops or self.count == len(self.known)
            if ended or at >= checked or token != self.drafted[at]:
                break
        drawn = self.known[start : self.count]
        right = common_prefix(drawn, self.drafted)
        self.drafted = self.drafted[len(drawn) :] if right == len(drawn) else self.drafted[:0]
        return len(drawn), min(right, checked), ended


class AnswerChecker:
    """Not thread-safe. `step` advances up to eight answers, of all tenants in turn, by one pass.

    A context stays for a while after its answer, for the next one of the conversation, if its tenant is the same; what
    is evicted is found in the store again, or computed.
    """

    def __init__(
        self, engine: Engine, store: Store | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._engine, self._store, self._clock = engine, store, clock
        self._answers: dict[int, _Answer] = {}
        self._turns = Turns[bytes](BURST)
        self._resident: list[_Resident] = []
        self._digits: DigitQuestion | None = None

    def _question(self) -> DigitQuestion:
        if self._digits is None:
            if self._engine.text is None:
                raise EngineError("this model has no tokenizer, so it can give no digit")
            self._digits = DigitQuestion(self._engine.text)
        return self._digits

    @property
    def busy(self) -> bool:
        """True while there are answers."""
        return bool(self._answers)

    def open(self, number: int, salt: bytes, request: Verify, audited: int) -> None:
        """Begin an answer. Raises ConfigError for a rule without a meaning."""
        self._answers[number] = _Answer(number, salt, request, audited, self._engine.space.max_tokens)
        if len(request.draft):
            self.draft(number, 0, np.frombuffer(request.draft, "<i4"))

    def draft(self, number: int, start: int, ids: Tokens) -> None:
        """Take a draft; what has no meaning counts for nothing, as in the protocol."""
        one = self._answers.get(number)
        if one is not None and int(ids.min()) >= 0 and int(ids.max()) < self._engine.space.vocab_size:
            one.draft(start, ids)

    def close(self, number: int) -> None:
        """Forget an answer; its context stays for a while."""
        one = self._answers.pop(number, None)
        if one is not None and one.context is not None:
            self._resident.append(_Resident(one.salt, one.context, self._clock()))
            self._expire()

    def _expire(self) -> None:
        left = [one for one in self._resident if one.at > self._clock() - _WAIT][-_CONTEXTS:]
        while left and sum(one.context.nbytes for one in left) > _BYTES:
            left.pop(0)
        self._resident = left

    def step(self) -> list[Checked]:
        """Advance answers by one pass."""
        chosen = self._chosen()
        found = [self._begin(one) for one in chosen if one.context is None]
        failed = [one for one in found if one is not None]
        going = [one for one in chosen if one.context is not None]
        if not going:
            return failed
        batch, drafts = list[tuple["Context", Tokens]](), list[int]()
        for one in going:
            assert one.context is not None
            tokens, checked = one.next(self._question)
            batch.append((one.context, tokens))
            drafts.append(checked)
        decodes = all(len(tokens) == 1 + checked for (_, tokens), checked in zip(batch, drafts))
        began = self._clock()
        results = self._engine.step(batch, limit=_SLICE, rows=[1 + checked for checked in drafts])
        seconds = self._clock() - began
        rows = sum(len(tokens) for _, tokens in batch) if decodes else 0
        passed = Verdict(1, 0, rows=rows, contexts=len(batch), micros=int(seconds * 1e6))
        return failed + [
            self._checked(one, result, checked, passed) for one, result, checked in zip(going, results, drafts)
        ]

    def _chosen(self) -> Sequence[_Answer]:
        """Return the answers of the next pass: of each tenant one in turn."""
        waiting = dict[bytes, list[_Answer]]()
        for one in self._answers.values():
            waiting.setdefault(one.salt, []).append(one)
        chosen = list[_Answer]()
        order = self._turns.order(waiting)
        while order and len(chosen) < _TOGETHER:
            for salt in order:
                chosen.append(waiting[salt].pop(0))
            order = [salt for salt in order if waiting[salt]]
        for one in chosen[:_TOGETHER]:
            self._turns.charge(one.salt, 1.0)
            del self._answers[one.number]  # behind those that wait
            self._answers[one.number] = one
        return chosen[:_TOGETHER]

    def _begin(self, one: _Answer) -> Checked | None:
        """Find the context of a prompt in memory or in the store; returns what failed."""
        try:
            if one.judge is not None and one.judge.kind == "digit":
                self._question()
            one.context = self._take_resident(one) or self._load(one)
        except CtxReuseError as error:
            del self._answers[one.number]
            return Checked(one.number, None, True, error.what)
        one.cached = one.context.n
        return None

    def _take_resident(self, one: _Answer) -> Context | None:
        self._expire()
        shared = [
            min(common_prefix(other.context.tokens, one.tokens), one.count - 1) if other.salt == one.salt else 0
            for other in self._resident
        ]
        best = max(range(len(shared)), key=shared.__getitem__, default=None)
        # Less than a block is as soon computed.
        if best is None or shared[best] < self._engine.space.block_tokens:
            return None
        context = self._resident.pop(best).context
        return context if self._engine.crop(context, shared[best]) else None

    def _load(self, one: _Answer) -> Context:
        space = self._engine.space
        if self._store is None:
            return self._engine.new_context(len(one.known) - 1)
        keys = prefix_keys(space.digest, one.salt, one.tokens, space.block_tokens)
        return resume_stored(self._engine, keys[: one.audited], one.tokens, self._store, len(one.known) - 1)

    def _checked(self, one: _Answer, result: Logits | CtxReuseError | None, checked: int, passed: Verdict) -> Checked:
        start, score, drafted = one.count - one.prompt, None, checked
        if result is None or (one.judge is not None and not one.judging and not isinstance(result, CtxReuseError)):
            # Of a prompt.
            return Checked(
                one.number, msgspec.structs.replace(passed, id=one.number, start=start, rows=0, cached=one.cached)
            )
        try:
            if isinstance(result, CtxReuseError):
                raise result
            if one.judge is not None:
                drafted, passed = len(one.drafted), msgspec.structs.replace(passed, rows=0)
                score, (drawn, right, ended) = one.decide(result, self._question)
            else:
                drawn, right, ended = one.take(result, checked)
            context, known = one.context, one.count - 1
            assert context is not None
            if context.n > known and not self._engine.crop(context, known):
                raise EngineError("the engine could not forget the part of a draft that was wrong")
        except CtxReuseError as error:
            del self._answers[one.number]
            return Checked(one.number, None, True, error.what)
        verdict = msgspec.structs.replace(
            passed,
            id=one.number,
            start=start,
            tokens=one.known[one.count - drawn : one.count].tobytes(),
            drafted=drafted,
            accepted=right,
            cached=one.cached,
            score=score,
        )
        if ended:
            self.close(one.number)
        return Checked(one.number, verdict, ended)
