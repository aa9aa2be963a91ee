"""A request, and the record of the context that it becomes: both are made once and travel whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ctxreuse.block.levels import is_raw
from ctxreuse.engines.base import check_vocabulary
from ctxreuse.errors import ContextTooLongError, EngineError
from ctxreuse.identity.keys import ROOT, Tokens, as_tokens, prefix_keys
from ctxreuse.why import MissSpan, RequestInfo

if TYPE_CHECKING:
    from ctxreuse.block.format import BlockView
    from ctxreuse.bus.remote import Fetch
    from ctxreuse.engines.base import Context, Logits
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.runtime.inflight.sharing import PromptInFlight
    from ctxreuse.runtime.spans import Spans
    from ctxreuse.usage import Usage
    from ctxreuse.why import OpenRequest

__all__ = ["ContextRecord", "PrefillResult", "PromptLike", "Request", "more_keys", "validate_tokens"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and its caller's limits, made by `RuntimeProtocol.request`: the keys are hashed once.

    Attributes:
        ids: token ids, int32 [n], valid for the model.
        keys: prefix keys of its whole blocks; empty where another process computes.
        parts: positions at which parts end (turns, documents, tool results) that were encoded one by one; with
            ``max_kl`` their KV is found at any position.
        branches: positions after which other contexts may continue differently, such as the ends of turns: a model with
            states can be resumed there.
        max_kl: the largest KL, in nats a token, of the KV that may be reused and left behind; None: exact KV only.
        about: client and names of the parts, for `RuntimeProtocol.why`.
        priority: the lower, the sooner it is computed: below 0 interactive, above 0 background.
        caller: whose it is: callers share the engine, whatever priorities they claim.
    """

    ids: Tokens
    keys: Sequence[bytes] = ()
    parts: Sequence[int] = ()
    branches: Sequence[int] = ()
    max_kl: float | None = None
    about: RequestInfo = field(default_factory=RequestInfo)
    priority: int = 0
    caller: str = ""


#: A request, or token ids for one with defaults (exact KV only).
PromptLike = Request | Sequence[int] | Tokens


@dataclass(slots=True, eq=False, weakref_slot=True)
class ContextRecord:
    """Facts about a context from its prompt until its release. One thread at a time, as for the context.

    Attributes:
        request: the prompt.
        cut_points: positions at which the store should keep states, as planned before computing.
        indexed: leading tokens whose chunks an earlier request has indexed.
        computed: spans of the prompt that were computed now.
        gate_outcome: whether chunks were reused at other positions: ``allowed``, ``exceeded`` (their probes deviated
            too much), ``refused``; "": there were none.
        received: blocks that came encoded from another node, by their number in the context.
        given: who sent a block that was fetched, see `giver_id`, by its number.
        refinements: the fetch that may still bring refinements of these; its taker stops it.
        logged: its entry in the request log.
        number: its number with the traffic recorder, -1 without one.
        partial: the key of the partial block that was loaded, b"" if none was; see `PartialBlocks`.
        in_flight: the prompt, for other requests that begin alike; None: they cannot see it.
    """

    request: Request
    cut_points: Sequence[int] = ()
    indexed: int = 0
    computed: Spans = ()
    gate_outcome: str = ""
    received: Mapping[int, BlockView] = field(default_factory=dict)
    given: Mapping[int, bytes] = field(default_factory=dict)
    refinements: Fetch | None = None
    logged: OpenRequest | None = None
    number: int = -1
    partial: bytes = b""
    in_flight: PromptInFlight | None = None
    _unreleased: Callable[[], object] | None = None

    def receive(self, views: Sequence[BlockView], refinements: Fetch | None, giver: bytes = b"") -> None:
        """Note the blocks that were loaded; ``refinements`` is stopped if the context is dropped unreleased."""
        self.given = {v.header.end // len(v.tokens) - 1: giver for v in views}
        self.received = {v.header.end // len(v.tokens) - 1: v for v in views if not is_raw(v.header.level)}
        if refinements is not None and self.received:
            self.refinements = refinements
            self._unreleased = weakref.finalize(self, refinements.stop)
        elif refinements is not None:
            refinements.stop()

    def take_refinements(self) -> Fetch | None:
        """Return the fetch of refinements, now the caller's to stop."""
        if isinstance(self._unreleased, weakref.finalize):
            self._unreleased.detach()
        fetch, self.refinements = self.refinements, None
        return fetch


class PrefillResult:
    """A context in the engine's memory, and its usage. The caller owns it until `Runtime.release`.

    Attributes:
        context: the prompt's context.
        logits: float32 [vocab], after its last token.
        usage: reused tokens and seconds.
        computed: the spans that were not reused, ascending, with their reasons where known.
        record: further facts about the context.
    """

    __slots__ = ("computed", "context", "logits", "record", "usage")

    def __init__(
        self, context: Context, logits: Logits, usage: Usage, computed: Sequence[MissSpan], record: ContextRecord
    ) -> None:
        self.context, self.logits, self.usage, self.computed, self.record = context, logits, usage, computed, record


def validate_tokens(space: ModelSpace, tokens: Sequence[int] | Tokens) -> Tokens:
    """Return the prompt as int32 ids. Raises EngineError for an empty one, ContextTooLongError, TokenRangeError."""
    if not len(tokens):
        raise EngineError("the context is empty", fix="Give at least one token: there is nothing to continue")
    # Before anything that takes a time for each token.
    if len(tokens) > space.max_tokens:
        raise ContextTooLongError(
            f"the context has {len(tokens):,} tokens and the model takes {space.max_tokens:,}",
            where=space.architecture,
            fix="Fork from an earlier turn, roll back, or shorten the documents",
        )
    ids = as_tokens(tokens)
    check_vocabulary(space, ids)
    return ids


def more_keys(space: ModelSpace, salt: bytes, tokens: Tokens, keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys of the whole blocks of ``tokens``; the first are known as ``keys``, only the others are
    hashed."""
    size, parent = space.block_tokens, keys[-1] if keys else ROOT
    return [*keys, *prefix_keys(space.digest, salt, tokens[len(keys) * size :], size, parent)]
