"""An answer that this node's model writes in steps, which another node's model accepts or rewrites."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ctxreuse.bus.protocol.messages import MAX_STOPS, JudgeRule, Verify
from ctxreuse.errors import CtxReuseError, EngineError
from ctxreuse.identity.keys import common_prefix
from ctxreuse.judge import OwnJudge
from ctxreuse.pauses import infer
from ctxreuse.runtime.elsewhere import SEEDS, ElsewhereAnswer
from ctxreuse.runtime.steps.order import RequestCancelledError
from ctxreuse.usage import StepUsage, Usage
from ctxreuse.why.records import VerifiedOutcome

if TYPE_CHECKING:
    from ctxreuse.bus.protocol.messages import Verdict
    from ctxreuse.bus.remote import Verification
    from ctxreuse.engines.base import Logits
    from ctxreuse.engines.generate import AnswerDecoder
    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.engines.text import TextModel
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.pauses import PauseKind
    from ctxreuse.runtime.elsewhere import Verifying, VerifyingRuntime
    from ctxreuse.runtime.request import PrefillResult, Request
    from ctxreuse.runtime.steps.order import RequestTurn

__all__ = ["SteppedAnswer"]

log = logging.getLogger(__name__)

#: What ends a step, besides its longest and the answer's end (SpecReason, Pan et al. 2025).
_END = "\n\n"
_UNTRUSTED = "the cloud's model is not trusted to judge steps so; measure it there: `ctxreuse calibrate NAME --judge`"


def _ends(text: TextModel, step: Sequence[int]) -> bool:
    """True if a step is complete."""
    return _END in text.decode(np.array(step, "<i4")).lstrip()


class _Writer:
    """Steps of this node's model, in one context; what was judged and found wrong is cropped. Not thread-safe.

    Attributes:
        step: tokens of the step that is being written, behind those that wait for their verdict.
        seconds: of its passes.
    """

    def __init__(
        self, runtime: VerifyingRuntime, text: TextModel, done: PrefillResult, turn: RequestTurn,
        sampling: SamplingParams, most: int,
    ) -> None:  # fmt: skip
        from ctxreuse.engines.sampling import Sampler

        self._runtime, self._text, self._turn, self._most = runtime, text, turn, most
        self.context = done.context
        self._logits: Logits | None = done.logits
        self._sampler = Sampler(sampling, len(done.context.tokens))
        #: Tokens that end the answer.
        self.stops = frozenset[int]() if sampling.ignore_eos else text.stop_ids
        self.step, self.seconds = list[int](), 0.0

    def ended(self, left: int) -> bool:
        """True if the step is complete; ``left``: tokens that the answer may have behind what it follows."""
        step = self.step
        return len(step) >= min(self._most, left) or bool(step and (step[-1] in self.stops or _ends(self._text, step)))

    def write(self, before: Tokens) -> None:
        """Write one token of the step that follows ``before``. Raises what `Engine.prefill` raises."""
        known = np.concatenate([before, np.array(self.step, "<i4")])
        began, logits = self._runtime.clock(), self._logits
        if logits is None or self.context.n != len(known):
            keep = min(common_prefix(self.context.tokens, known), len(known) - 1)
            if keep < self.context.n and not self._runtime.engine.crop(self.context, keep):
                raise EngineError("the engine could not forget a step that was wrong")
            (found,) = self._runtime.steps.advance_all([(self.context, known[keep:])], self._turn)
            if isinstance(found, Exception):
                raise found
            assert found.logits is not None
            logits = found.logits
        self._logits = None
        self.step.append(self._sampler.next(logits, known))
        self.seconds += self._runtime.clock() - began

    def take(self) -> tuple[list[int], float]:
        """Return the step and its seconds; another one begins."""
        found = self.step, self.seconds
        self.step, self.seconds = [], 0.0
        return found


class SteppedAnswer(ElsewhereAnswer):
    """A `PieceSource`: steps are written here, and given out when they are accepted, or as the other node writes them.

    While a step is judged this node goes on with the next one, as if it were accepted.
    """

    def __init__(
        self,
        runtime: VerifyingRuntime,
        text: TextModel,
        request: Request,
        sampling: SamplingParams,
        was: PauseKind | None,
        verifying: Verifying,
    ) -> None:
        super().__init__(runtime, text, request, sampling, was, verifying)
        self._step_rule, self._turn = verifying.steps, runtime.turn(request)
        self._done: PrefillResult | None = None
        self._writer: _Writer | None = None
        #: The step that waits for its verdict, and what the other node has written in its place (None: nothing yet).
        self._step: list[int] = []
        self._rewrite: list[int] | None = None
        self._steps: list[StepUsage] = []
        self._since, self._reason = 0.0, ""

    @property
    def usage(self) -> Usage | None:
        """See `PieceSource.usage`."""
        if self._done is None:
            return None
        usage, steps = self._done.usage, tuple(self._steps)
        tokens = msgspec.structs.replace(usage.tokens, verified=sum(one.rewritten for one in steps))
        return msgspec.structs.replace(usage, tokens=tokens, verification=self._reason or "steps", steps=steps)

    def _start(self, decoder: AnswerDecoder) -> None:
        runtime, request = self._runtime, self._request
        runtime.paused.on_request(request.ids, request.keys, self._was)
        self._done = done = runtime.prefill(request, reserve=decoder.left, turn=self._turn)
        self._writer = _Writer(runtime, self._text, done, self._turn, self._sampling, self._step_rule.tokens)

    def _advance(self, decoder: AnswerDecoder) -> None:
        """Write a token, judge a step, or take a verdict."""
        writer, verification = self._writer, self._verification
        assert writer is not None
        if self._cancelled:
            raise RequestCancelledError("the request was cancelled")
        if verification is not None:
            self._wait(verification, decoder, writer)
        elif not writer.ended(decoder.left):
            writer.write(decoder.history)
            if self._reason:  # no judge is left
                self._give(decoder, writer.take()[0])
        else:
            self._propose(decoder, writer)

    def _wait(self, verification: Verification, decoder: AnswerDecoder, writer: _Writer) -> None:
        """Write ahead of the verdict until it is there, and take it."""
        left = decoder.left - len(self._step)
        ahead = self._rewrite is None and self._step[-1] not in writer.stops and not writer.ended(left)
        if ahead and not verification.ready:
            writer.write(np.concatenate([decoder.history, np.array(self._step, "<i4")]))
            return
        found = self._take(verification)
        if isinstance(found, str):
            self._ended(found, decoder)
            return
        verdict, ids = found
        if self._rewrite is None:
            if verdict.score is None and not len(ids):  # the prompt is being computed
                return
            if verdict.score is None:  # it knows no steps
                verification.stop()
                self._ended("failed", decoder)
                return
            if self._judged(verdict, decoder):
                return
        assert self._rewrite is not None
        for token in ids.tolist():
            self._rewrite.append(token)
            self._give(decoder, [token])
            if decoder.ended or _ends(self._text, self._rewrite) or len(self._rewrite) >= self._step_rule.tokens:
                verification.stop()
                self._ended("", decoder)
                return

    def _propose(self, decoder: AnswerDecoder, writer: _Writer) -> None:
        """Let a step be judged."""
        self._step, seconds = writer.take()
        self._since = self._runtime.clock()
        self._steps.append(StepUsage(len(self._step), seconds_drafting=seconds))
        rule, threshold = self._step_rule, self._step_rule.threshold
        if self._sampling.step_threshold is not None:
            threshold = self._sampling.step_threshold
        judge: JudgeRule | None = None
        if isinstance(rule.judge, OwnJudge):
            try:
                score = rule.judge(self._text.decode(decoder.history), self._text.decode(np.array(self._step, "<i4")))
            except CtxReuseError as error:
                log.warning("%s", error)
                self._ended("judge", decoder)
                return
            accepted = score >= (rule.judge.judged.threshold if threshold is None else threshold)
            self._note(score=score, accepted=accepted, seconds_judging=self._runtime.clock() - self._since)
            if accepted:
                self._accept(decoder)
                return
            self._rewrite, self._since = [], self._runtime.clock()
        else:
            judge = JudgeRule(rule.judge, threshold)
        self._verification = self._verifying.verifier.verify(self._runtime.engine.space, self._message(decoder, judge))
        if self._verification is None:
            self._ended("down", decoder)

    def _message(self, decoder: AnswerDecoder, judge: JudgeRule | None) -> Verify:
        sampling, history = self._sampling, decoder.history
        stops = set() if sampling.ignore_eos else set(self._text.stop_ids)
        end = self._text.encode(_END, markers=False)
        stops |= {int(end[0])} if len(end) == 1 else set()
        drawn = self._rule(((sampling.seed or 0) + len(history)) % SEEDS)
        step = np.array(self._step if judge is not None else [], "<i4").tobytes()
        count, most = min(max(self._step_rule.tokens, len(self._step)), decoder.left), tuple(sorted(stops))[:MAX_STOPS]
        return Verify(1, self._runtime.engine.space.digest, history.tobytes(), count, 0, most, drawn, step, judge)

    def _judged(self, verdict: Verdict, decoder: AnswerDecoder) -> bool:
        """Take the judgement of a step; True if it was accepted."""
        now = self._runtime.clock()
        accepted = bool(verdict.accepted)
        self._note(score=verdict.score, accepted=accepted, seconds_judging=now - self._since)
        if not accepted:
            self._rewrite, self._since = [], now
            return False
        self._verification = None
        self._accept(decoder)
        return True

    def _accept(self, decoder: AnswerDecoder) -> None:
        self._give(decoder, self._step)
        self._step = []

    def _ended(self, reason: str, decoder: AnswerDecoder) -> None:
        """The other node says no more about a step: it is whole, or no judge sees the rest of the answer."""
        writer = self._writer
        assert writer is not None
        if not reason and not self._rewrite:  # it said nothing of the step, and would not the next time
            reason = "failed"
        if self._rewrite:
            self._note(rewritten=len(self._rewrite), seconds_rewriting=self._runtime.clock() - self._since)
        unjudged = self._rewrite is None
        self._rewrite = None
        if reason:
            self._reason = reason
            if reason == "judge" and self._verification is not None:
                log.warning(_UNTRUSTED)
            if self._runtime.metrics is not None:
                self._runtime.metrics.add("ctxreuse_verified_answers_total", 1, reason)
        self._verification = None
        ahead = writer.take()[0]  # of a step that another one has replaced
        if reason and unjudged:
            self._give(decoder, [*self._step, *ahead])
        self._step = []

    def _note(self, **what: object) -> None:
        self._steps[-1] = msgspec.structs.replace(self._steps[-1], **what)

    def cancel(self) -> None:
        """See `PieceSource.cancel`."""
        self._cancelled = True
        self._runtime.steps.cancel(self._turn)
        self._runtime.inflight.wake()
        if (verification := self._verification) is not None:
            verification.stop()

    def end(self, finish: str, text: str, usage: Usage) -> None:
        """See `PieceSource.end`."""
        runtime = self._runtime
        with self._lock:
            if self._verification is not None:
                self._verification.stop()
            runtime.steps.end(self._turn)
            done, decoder = self._done, self._decoder
            if done is None or decoder is None:
                return
            if finish == "error":
                runtime.drop(done)
            else:
                context = done.context
                runtime.engine.crop(context, min(common_prefix(context.tokens, decoder.history), context.n))
                if done.record.logged is not None:
                    accepted = sum(one.accepted for one in usage.steps)
                    outcome = VerifiedOutcome(usage.tokens.verified, usage.verification, len(usage.steps), accepted)
                    runtime.requests.verified(done.record.logged, outcome)
                ids, nbytes = context.tokens.copy(), context.nbytes
                keys = runtime.release(done)
                runtime.paused.on_pause(
                    ids, keys, infer(finish, (), text=bool(text)), nbytes=nbytes, max_kl=self._request.max_kl
                )
            if runtime.recorder is not None and done.record.number >= 0:
                busy = runtime.clock() - self._began
                runtime.recorder.ended(done.record.number, output=usage.tokens.completion, busy=busy)
            if runtime.metrics is not None:
                runtime.metrics.record(usage, finish, None)
                for one in usage.steps:
                    runtime.metrics.add("ctxreuse_judged_steps_total", 1, one.verdict)
                if not self._reason:
                    runtime.metrics.add("ctxreuse_verified_answers_total", 1, "steps")
