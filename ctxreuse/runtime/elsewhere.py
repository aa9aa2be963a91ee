"""What answers have in common that another node decodes or judges over the bus: pieces, the exchange, and its end."""

from __future__ import annotations

import secrets
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from ctxreuse.bus.protocol.messages import DrawRule
from ctxreuse.runtime.answers import AnsweringRuntime
from ctxreuse.runtime.completion import Completion
from ctxreuse.runtime.steps.order import RequestCancelledError
from ctxreuse.speculate import DraftPolicy, PassCosts

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
    from ctxreuse.usage import Usage
    from ctxreuse.why import OpenRequest, RequestInfo, Why

__all__ = ["SEEDS", "ElsewhereAnswer", "Verifying", "VerifyingRuntime"]

#: Seconds without a verdict after which the other node is given up; it says so while it computes a prompt.
_PATIENCE = 10.0
#: Seeds that fit into a message.
SEEDS = 1 << 62


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


class ElsewhereAnswer:
    """A `PieceSource` over an exchange with another node; what becomes of it is for those that derive from this."""

    def __init__(
        self,
        runtime: VerifyingRuntime,
        text: TextModel,
        request: Request,
        sampling: SamplingParams,
        was: PauseKind | None,
        verifying: Verifying,
    ) -> None:
        if sampling.temperature > 0 and sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbelow(SEEDS))
        self._runtime, self._text, self._request = runtime, text, request
        self._sampling, self._was, self._verifying = sampling, was, verifying
        self._lock = threading.RLock()
        self._pieces: deque[GeneratedToken] = deque()
        self._decoder: AnswerDecoder | None = None
        self._verification: Verification | None = None
        #: What goes on at this node, if it does.
        self._local: PieceSource | None = None
        self._began, self._cancelled = 0.0, False

    def completion(self) -> Completion:
        """Return the answer, once."""
        return Completion(self, len(self._request.ids))

    @property
    @abstractmethod
    def usage(self) -> Usage | None:
        """See `PieceSource.usage`."""

    @abstractmethod
    def end(self, finish: str, text: str, usage: Usage) -> None:
        """See `PieceSource.end`."""

    @abstractmethod
    def cancel(self) -> None:
        """See `PieceSource.cancel`."""

    @abstractmethod
    def _start(self, decoder: AnswerDecoder) -> None:
        """Begin the answer; the clock was read."""

    @abstractmethod
    def _advance(self, decoder: AnswerDecoder) -> None:
        """Do what comes next of an answer that has not ended."""

    def next(self) -> GeneratedToken | None:
        """See `PieceSource.next`."""
        from ctxreuse.engines.generate import AnswerDecoder

        with self._lock:
            while not self._pieces:
                if self._local is not None:
                    return self._local.next()
                if self._decoder is None:
                    self._began, space = self._runtime.clock(), self._runtime.engine.space
                    self._decoder = AnswerDecoder(self._text, space, self._request.ids, self._sampling)
                    self._start(self._decoder)
                elif self._decoder.ended:
                    return None
                else:
                    self._advance(self._decoder)
            return self._pieces.popleft()

    def why(self, request: str, *, others: bool) -> Why:
        """See `PieceSource.why`."""
        return self._runtime.why(request, others=others)

    def _rule(self, seed: int) -> DrawRule:
        """How the other node draws tokens."""
        names = (name for name in DrawRule.__struct_fields__ if name != "seed")
        return DrawRule(**{name: getattr(self._sampling, name) for name in names}, seed=seed)

    def _take(self, verification: Verification) -> tuple[Verdict, Tokens] | str:
        """Wait for a verdict; returns it with its tokens, or why there is none. Raises RequestCancelledError."""
        verdict = verification.take(_PATIENCE)
        if verdict is None:
            if self._cancelled:
                raise RequestCancelledError("the request was cancelled")
            return verification.ended or ""
        ids = np.frombuffer(verdict.tokens, "<i4")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._runtime.engine.space.vocab_size:
            verification.stop()
            return "failed"
        return verdict, ids

    def _give(self, decoder: AnswerDecoder, tokens: Sequence[int]) -> None:
        """Append tokens to the answer, up to its end."""
        for token in tokens:
            if not decoder.ended:
                self._pieces.append(decoder.take(token))
