"""An answer that another node decodes while this one drafts it; what that node does not finish is decoded here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ctxreuse.bus.protocol.messages import MAX_STOPS, MAX_TOKENS, Verify
from ctxreuse.runtime.answers import AnswerGroup
from ctxreuse.runtime.elsewhere import SEEDS, ElsewhereAnswer
from ctxreuse.speculate import PassLoad, PipelinedDrafter
from ctxreuse.speculate.drafter import MOST
from ctxreuse.usage import TokenUsage, Usage
from ctxreuse.why.records import VerifiedOutcome

if TYPE_CHECKING:
    from ctxreuse.bus.protocol.messages import Verdict
    from ctxreuse.engines.generate import AnswerDecoder
    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.engines.text import TextModel
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.pauses import PauseKind
    from ctxreuse.runtime.elsewhere import Verifying, VerifyingRuntime
    from ctxreuse.runtime.request import Request
    from ctxreuse.why import OpenRequest

__all__ = ["VerifiedAnswer", "refusal"]


def refusal(samplings: Sequence[SamplingParams]) -> str:
    """Return why answers cannot be decoded elsewhere; "": they can."""
    one = samplings[0]
    if len(samplings) > 1:
        return "many"
    if one.verify == "off" or not one.max_tokens:
        return "off"
    if one.grammar is not None:
        return "grammar"
    return "sampling" if one.logprobs or one.logit_bias or (one.seed or 0) >= SEEDS else ""


class VerifiedAnswer(ElsewhereAnswer):
    """A `PieceSource`: pieces come from another node, and from this one where that ends early."""

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
        self._drafter: PipelinedDrafter | None = None
        self._logged: OpenRequest | None = None
        self._usage: Usage | None = None
        self._load = PassLoad()

    @property
    def usage(self) -> Usage | None:
        """See `PieceSource.usage`."""
        own, local = self._usage, self._local.usage if self._local is not None else None
        if own is None or local is None:
            return own or local
        # The other node's counts of the prompt; of drafts and seconds both.
        tokens = msgspec.structs.replace(
            own.tokens,
            drafted=own.tokens.drafted + local.tokens.drafted,
            accepted=own.tokens.accepted + local.tokens.accepted,
        )
        seconds = msgspec.structs.replace(local.seconds, saved=own.seconds.saved + local.seconds.saved)
        return msgspec.structs.replace(own, tokens=tokens, seconds=seconds)

    def _start(self, decoder: AnswerDecoder) -> None:
        request, sampling, space = self._request, self._sampling, self._runtime.engine.space
        stops = () if sampling.ignore_eos else tuple(sorted(self._text.stop_ids))[:MAX_STOPS]
        count, rule = min(decoder.left, MAX_TOKENS), self._rule(sampling.seed or 0)
        message = Verify(1, space.digest, request.ids.tobytes(), count, MOST, stops, rule)
        self._verification = self._verifying.verifier.verify(space, message)
        if self._verification is None:
            self._decode_here("down")
            return
        drafting = self._verifying.drafting
        policy = self._verifying.policy(self._verification.peer)
        self._drafter = drafting.begin_elsewhere(policy, request, sampling)
        if self._cancelled:
            self._verification.stop()

    def _advance(self, decoder: AnswerDecoder) -> None:
        """Take one verdict, or go on here if there is none."""
        verification, drafter = self._verification, self._drafter
        assert verification is not None
        assert drafter is not None
        found = self._take(verification)
        if isinstance(found, str):
            self._decode_here(found or "tokens")
            return
        verdict, ids = found
        self._note(verdict, ids)
        self._give(decoder, ids.tolist())
        if decoder.ended:
            verification.stop()
            return
        left = decoder.left - 1  # the last token that it may have is never fed
        before, draft = drafter.next(decoder.history, left, self._load, verification.rtt)
        if len(draft):
            verification.draft(len(decoder.history) - len(self._request.ids) + before, draft)

    def _note(self, verdict: Verdict, ids: Tokens) -> None:
        """Learn from a verdict, and count it."""
        drafter = self._drafter
        assert drafter is not None
        assert self._verification is not None
        seconds = verdict.micros / 1e6
        if verdict.rows:
            policy = self._verifying.policy(self._verification.peer)
            policy.costs.observe(verdict.rows, verdict.contexts, seconds)
            others = max(verdict.contexts - 1, 0)
            self._load = PassLoad(others, max(verdict.rows - others - 1 - verdict.drafted, 0))
        if len(ids):
            load = self._load if verdict.rows else None
            drafter.checked(ids, verdict.drafted, verdict.accepted, seconds, load)
        n = len(self._request.ids)
        usage = self._usage
        if usage is None:
            cached = min(verdict.cached, n)
            tokens = TokenUsage(prompt=n, cached=cached, by_source={"cloud": cached} if cached else {})
            usage = Usage(tokens, verification="cloud")
            self._logged = self._runtime.log_elsewhere(self._request, usage)
            usage = msgspec.structs.replace(usage, request=self._logged.entry.request)
        tokens = msgspec.structs.replace(
            usage.tokens,
            verified=usage.tokens.verified + len(ids),
            drafted=drafter.drafted,
            accepted=drafter.accepted,
        )
        spent = msgspec.structs.replace(usage.seconds, saved=drafter.saved)
        self._usage = msgspec.structs.replace(usage, tokens=tokens, seconds=spent)

    def _decode_here(self, reason: str) -> None:
        """Let this node's model go on from what is verified."""
        assert self._decoder is not None
        request = self._request
        history = self._decoder.history.copy()
        if self._usage is not None:
            request = self._runtime.request(
                history,
                parts=request.parts,
                branches=request.branches,
                max_kl=request.max_kl,
                priority=request.priority,
                caller=request.caller,
            )
            self._usage = msgspec.structs.replace(self._usage, verification=reason)
        group = AnswerGroup(self._runtime, self._text, request, [self._sampling], self._was, verification=reason)
        self._local = group.continue_with(self._decoder, log=self._usage is None)
        if self._runtime.metrics is not None:
            self._runtime.metrics.add("ctxreuse_verified_answers_total", 1, reason)

    def cancel(self) -> None:
        """See `PieceSource.cancel`."""
        self._cancelled = True
        if self._verification is not None:
            self._verification.stop()
        if self._local is not None:
            self._local.cancel()

    def end(self, finish: str, text: str, usage: Usage) -> None:
        """See `PieceSource.end`."""
        runtime, verification = self._runtime, self._verification
        with self._lock:
            if verification is not None:
                verification.stop()
            if self._drafter is not None and self._decoder is not None:
                drafting = self._verifying.drafting
                outcome = drafting.outcome(self._sampling, self._drafter)
                if self._logged is not None and outcome is not None:
                    runtime.requests.drafted(self._logged, outcome)
                if self._local is None and finish != "error":
                    drafting.end(self._request, self._drafter, self._decoder.history.copy())
            if self._logged is not None:
                verified = VerifiedOutcome(usage.tokens.verified, usage.verification)
                runtime.requests.verified(self._logged, verified)
                tokens = self._decoder.history.copy() if self._decoder is not None else self._request.ids
                runtime.requests.kept(self._logged, tokens, ())
        if self._local is not None:
            self._local.end(finish, text, usage)
        elif runtime.metrics is not None and self._usage is not None:
            runtime.metrics.record(usage, finish, None)
            runtime.metrics.add("ctxreuse_verified_answers_total", 1, usage.verification)
