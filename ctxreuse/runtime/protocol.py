"""The interface of a runtime, whether it computes in this process or in a daemon."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.engines.text import TextModel
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.pauses import PauseKind
    from ctxreuse.planner import Part, Plan
    from ctxreuse.runtime.completion import Completion
    from ctxreuse.runtime.request import PromptLike, Request
    from ctxreuse.store.base import Store
    from ctxreuse.usage import Usage
    from ctxreuse.why import RequestInfo, Why

__all__ = ["RuntimeProtocol"]


@runtime_checkable
class RuntimeProtocol(Protocol):
    """Answers prompts and keeps their KV. Any thread may call.

    Implemented by `Runtime` here, and by the agents' client of an edge daemon, which raises LinkDownError where that
    does not answer.
    """

    @property
    def space(self) -> ModelSpace:
        """The identity of the model."""

    @property
    def text(self) -> TextModel | None:
        """Tokenizer and chat template; None: only token ids are taken."""

    @property
    def store(self) -> Store | None:
        """Where KV is stored, if that belongs to this process."""

    def check_max_kl(self, max_kl: float | None) -> None:
        """Raise ConfigError, saying what to do, if nothing can be known to be within ``max_kl``."""

    def request(
        self,
        tokens: Sequence[int] | Tokens,
        *,
        parts: Sequence[int] = (),
        branches: Sequence[int] = (),
        max_kl: float | None = None,
        about: RequestInfo | None = None,
        priority: int = 0,
        caller: str = "",
    ) -> Request:
        """Check a prompt and make a `Request` of it, which has the meaning of the arguments.

        Raises EngineError for an empty prompt, ContextTooLongError, TokenRangeError, ConfigError (see `check_max_kl`).
        """

    def plan(self, parts: Sequence[Part], max_kl: float | None = None) -> Plan:
        """Order the parts of a prompt so that most KV is reused, now and by later requests; see `Planner.plan`.

        They stay as given without a store, and where ``max_kl`` and the model's chunk profile allow reuse at any
        position: order is then irrelevant.
        """

    def complete(self, prompt: PromptLike, sampling: SamplingParams, *, was: PauseKind | None = None) -> Completion:
        """Answer a prompt: an iterator of pieces. The prompt is checked now and computed at the first ``next``.

        ``was``: the reason of its session's last pause, if the prompt tells. Raises what `request` raises,
        EngineError without a tokenizer, and GrammarError for a `SamplingParams.grammar` that cannot be followed.
        """

    def complete_many(
        self, prompt: PromptLike, samplings: Sequence[SamplingParams], *, was: PauseKind | None = None
    ) -> list[Completion]:
        """Answer a prompt several times: it is computed once, and all answers share the engine's passes.

        Each completion may be iterated, closed and cancelled by itself; iterating one advances all. Their usages add
        up to the request's: the prompt is in that of the first. See `SamplingParams.answers`; else as `complete`.
        """

    def warm(self, prompt: PromptLike) -> Usage:
        """Compute a context now and keep its KV. Raises what `request` raises."""

    def forget(self, tokens: Sequence[int] | Tokens) -> int:
        """Drop the KV of ``tokens`` that no other context shares; returns the number of blocks. Text is untouched."""

    def erase(self, tokens: Sequence[int] | Tokens, *, session: str = "", keep: Iterable[Tokens] = ()) -> int:
        """Delete what was kept of a context, and of requests that went on from it or were of its ``session``: KV,
        token ids, explanations, hints; returns the number of blocks.

        What other requests in the log, and contexts of the ids in ``keep``, share with it stays.
        """

    def pause(
        self, tokens: Sequence[int] | Tokens, kind: str, *, expect: float | None = None, max_kl: float | None = None
    ) -> None:
        """Report that the context pauses, for ``expect`` seconds if known. Raises ConfigError for an unknown kind."""

    def resume(self, tokens: Sequence[int] | Tokens) -> None:
        """Report that the next request of the context is about to be made; `complete` does so itself."""

    def hint(self, tokens: Sequence[int] | Tokens, name: str, *, until: float | None = None) -> bool:
        """Take a hint on a context, ``until`` seconds from now; False for an unknown context. Raises ConfigError."""

    def supersede(self, tokens: Sequence[int] | Tokens, keep: int) -> int:
        """Drop the KV of ``tokens`` after the first ``keep`` that no other context shares; returns how many blocks."""

    def why(self, request: str = "", *, session: str = "", others: bool = False) -> Why:
        """Explain which tokens a request reused, and why not the others.

        Args:
            request: its id (``Usage.request``); "": the last one.
            session: the last one of this session.
            others: reveal that another tenant has computed the same, and no more than that.

        Raises:
            SessionError: the request is not in the log (any more).
        """

    def forget_requests(self, session: str | None = None) -> None:
        """Forget the logged requests of a session; without one, the token ids of all requests."""

    def close(self) -> None:
        """Release contexts and threads. The caller closes the store."""
