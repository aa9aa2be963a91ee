"""An answer that another node decodes while this one drafts it; what that node does not finish is decoded here."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from ctxreuse.bus.protocol.messages import MAX_STOPS, MAX_TOKENS, DrawRule, Verify
from ctxreuse.runtime.answers import AnswerGroup, AnsweringRuntime
from ctxreuse.runtime.completion import Completion
from ctxreuse.runtime.steps.order import RequestCancelledError
from ctxreuse.speculate import DraftPolicy, PassCosts, PassLoad, PipelinedDrafter
from ctxreuse.speculate.drafter import MOST
from ctxreuse.usage import TokenUsage, Usage
from ctxreuse.why.records import VerifiedOutcome

if TYPE_CHECKING:
    from ctxreuse.bus.protocol.messages import Verdict
    from ctxreuse.bus.remote import Verification, Verifier
    from ctxreuse.engines.generate import AnswerDecoder, GeneratedToken
    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.engines.text import TextModel
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.judge import StepRule
    from ctxreuse.pauses import PauseKind
    from ctxreuse.runtime.completion import PieceSource
    from ctxreuse.runtime.drafting import Drafting
    from ctxreuse.runtime.request import Request
    from ctxreuse.why import OpenRequest, RequestInfo, Why

__all__ = ["VerifiedAnswer", "Verifying", "refusal"]

#: Seconds without a verdict after which the other node is given up; it says so while it computes a prompt.
_PATIENCE = 10.0
#: Seeds that fit into a message.
_SEEDS = 1 << 62


def refusal(samplings: Sequence[SamplingParams]) -> str:
    """Return why answers cannot be decoded elsewhere; "": they can."""
    one = samplings[0]
    if len(samplings) > 1:
        return "many"
    if one.verify == "off" or not one.max_tokens:
        return "off"
    if one.grammar is not None:
        return "grammar"
    return "sampling" if one.logprobs or one.logit_bias or (one.seed or 0) >= _SEEDS else ""


class Verifying:
    """Whom a runtime lets decode its answers, and what is known of their passes. Any thread may call."""

    def __init__(self, verifier: Verifier, drafting: Drafting, steps: StepRule, *, in_steps: bool) -> None:
        """``in_steps``: answers are written here in steps, unless a request says otherwise."""
        self.verifier, self.drafting, self.steps, self.in_steps = verifier, drafting, steps, in_steps
        self._policies: dict[str, DraftPolicy] = {}
        self._lock = threading.Lock()

    def policy(self, peer: str) -> DraftPolicy:
        """Return what was learnt of a peer."""
        with self._lock:
            return self._policies.setdefault(peer, DraftPolicy(PassCosts()))


class VerifyingRuntime(AnsweringRuntime, Protocol):
    """What answers that are decoded elsewhere need of a `Runtime`."""

    def request(
        self,
        tokens: Tokens,
        *,
        parts: Sequence[int] = (),
        branches: Sequence[int] = (),
        max_kl: float | None = None,
        about: RequestInfo | None = None,
        priority: int = 0,
        caller: str = "",
    ) -> Request: ...

    def log_elsewhere(self, request: Request, usage: Usage) -> OpenRequest: ...


class VerifiedAnswer:
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
        self._runtime, self._text, self._request = runtime, text, request
        self._sampling, self._was, self._verifying = sampling, was, verifying
        self._lock = threading.RLock()
        self._pieces: deque[GeneratedToken] = deque()
        self._decoder: AnswerDecoder | None = None
        self._verification: Verification | None = None
        self._drafter: PipelinedDrafter | None = None
        self._local: PieceSource | None = None
        self._logged: OpenRequest | None = None
        self._usage: Usage | None = None
        self._cancelled = False
        self._load, self._began = PassLoad(), 0.0

    def completion(self) -> Completion:
        """Return the answer, once."""
        return Completion(self, len(self._request.ids))

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

    def next(self) -> GeneratedToken | None:
        """See `PieceSource.next`."""
        with self._lock:
            while not self._pieces:
                if self._local is not None:
                    return self._local.next()
                if self._decoder is None:
                    self._start()
                elif self._decoder.ended:
                    return None
                else:
                    self._advance()
            return self._pieces.popleft()

    def _start(self) -> None:
        from ctxreuse.engines.generate import AnswerDecoder

        runtime, request, sampling = self._runtime, self._request, self._sampling
        space = runtime.engine.space
        if sampling.temperature > 0 and sampling.seed is None:
            sampling = self._sampling = msgspec.structs.replace(sampling, seed=secrets.randbelow(_SEEDS))
        self._began = runtime.clock()
        self._decoder = AnswerDecoder(self._text, space, request.ids, sampling)
        stops = () if sampling.ignore_eos else tuple(sorted(self._text.stop_ids))[:MAX_STOPS]
        rule = DrawRule(**{name: getattr(sampling, name) for name in DrawRule.__struct_fields__ if name != "seed"})
        rule = msgspec.structs.replace(rule, seed=sampling.seed or 0)
        message = Verify(1, space.digest, request.ids.tobytes(), min(self._decoder.left, MAX_TOKENS), MOST, stops, rule)
        self._verification = self._verifying.verifier.verify(space, message)
        if self._verification is None:
            self._decode_here("down")
            return
        drafting = self._verifying.drafting
        policy = self._verifying.policy(self._verification.peer)
        self._drafter = drafting.begin_elsewhere(policy, request, sampling)
        if self._cancelled:
            self._verification.stop()

    def _advance(self) -> None:
        """Take one verdict, or go on here if there is none."""
        verification, decoder, drafter = self._verification, self._decoder, self._drafter
        assert verification is not None
        assert decoder is not None
        assert drafter is not None
        verdict = verification.take(_PATIENCE)
        if verdict is None:
            if self._cancelled:
                raise RequestCancelledError("the request was cancelled")
            self._decode_here(verification.ended or "tokens")
            return
        ids = np.frombuffer(verdict.tokens, "<i4")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._runtime.engine.space.vocab_size:
            verification.stop()
            self._decode_here("failed")
            return
        self._note(verdict, ids)
        for token in ids.tolist():
            if not decoder.ended:
                self._pieces.append(decoder.take(token))
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
        spent = msgspec.structs.replace(usage.seconds, saved=drafter.ledger.saved)
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

    def why(self, request: str, *, others: bool) -> Why:
        """See `PieceSource.why`."""
        return self._runtime.why(request, others=others)
