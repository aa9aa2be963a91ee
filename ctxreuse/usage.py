"""What one request reused and cost: tokens, seconds, and why reuse ended."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from ctxreuse.html import table

__all__ = ["StepUsage", "TokenUsage", "Usage", "UsageSeconds", "WireUsage", "total_usage"]


class TokenUsage(msgspec.Struct, frozen=True):
    """Token counts of one request.

    Attributes:
        prompt: tokens of the prompt.
        cached: of these, the tokens whose KV was reused.
        completion: generated tokens.
        by_source: reused tokens by tier: ``device``, ``host``, ``disk``; ``edge``, ``cloud``: another node's.
        by_level: reused tokens by the level of their KV, without profile digests (``exact``, ``kl-0.01``, …;
            ``approx``: derived from lossy KV).
        relocated: of the reused tokens, those whose KV was computed at another position or behind other tokens.
        recomputed: further tokens that were relocated and then computed again, to limit the error.
        drafted: tokens of drafts that were checked, see `ctxreuse.speculate`.
        accepted: of these, the tokens that were right: so many fewer passes.
        drafted_by_model, accepted_by_model: of both, the tokens that a draft model drafted.
        verified: tokens of the answer that another node's model said.
        exited: tokens of the answer that left the model early, see `ctxreuse.exits`.
        disagreed: of these, as far as verified, the tokens that the whole model would not have said.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    by_source: dict[str, int] = {}
    by_level: dict[str, int] = {}
    relocated: int = 0
    recomputed: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0
    exited: int = 0
    disagreed: int = 0
    drafted_by_model: int = 0
    accepted_by_model: int = 0

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt - self.cached


class UsageSeconds(msgspec.Struct, frozen=True):
    """Wall time of one request's prompt.

    Attributes:
        load: loading stored KV; where it overlaps computing, that part counts as ``compute``.
        fetch: waiting for other nodes while nothing else could be done, lookups included.
        compute: computing the rest.
        saved: of the answer, what its drafts and early exits saved; below 0: what they cost.
    """

    load: float = 0.0
    fetch: float = 0.0
    compute: float = 0.0
    saved: float = 0.0

    @property
    def total(self) -> float:
        """Seconds to the prompt's logits."""
        return self.load + self.fetch + self.compute


class StepUsage(msgspec.Struct, frozen=True):
    """One step of an answer that this node's model wrote and another one's judged.

    Attributes:
        drafted: its tokens.
        score: what the judge gave it; None: it was not judged, as no judge could be reached.
        accepted: it is part of the answer.
        rewritten: tokens that the other model wrote in its place.
        seconds_drafting, seconds_judging, seconds_rewriting: wall time; while a step is judged the next one is drafted.
    """

    drafted: int
    score: float | None = None
    accepted: bool = False
    rewritten: int = 0
    seconds_drafting: float = 0.0
    seconds_judging: float = 0.0
    seconds_rewriting: float = 0.0

    @property
    def verdict(self) -> str:
        """``accepted``, ``rewritten`` or ``unjudged``."""
        return "accepted" if self.accepted else "unjudged" if self.score is None else "rewritten"


class Usage(msgspec.Struct, frozen=True):
    """What one request reused and cost.

    Attributes:
        tokens, seconds: token counts and wall time.
        miss_reason: why the first whole block that had to be computed was not reused, in the words of the store
            (``absent``, ``corrupt``, ``level``, ``slow``, …) or the link (``link``, ``audit``); "" if none had to be.
        why: the same with what is known at once of ``absent``: ``new``, ``evicted``, ``dropped``, ``refused``,
            ``disk`` (it was full or failed), ``lost``, ``running`` or ``space`` (see `ctxreuse.why.reasons`).
        gate_decision: what the quality gate decided on relocating chunks, such as ``kl-0.024 by rotate`` or
            ``refused: …``; "" if there was nothing to relocate, or the request allows exact KV only.
        approximate: the answer was computed from lossy KV, or from KV derived from it.
        fetched_bytes: payload received from other nodes, used or not.
        verification: ``cloud``: another node's model gave the answer; else why this one gave it, or its rest (``cut``,
            ``stalled``, ``down``, ``busy``, ``sampling``, …); ``steps``: another node's model judged all steps of it;
            "": no other was to.
        steps: of an answer in steps, each of them.
        request: the request's id, for `Runtime.why`.
    """

    tokens: TokenUsage = TokenUsage()
    seconds: UsageSeconds = UsageSeconds()
    miss_reason: str = ""
    why: str = ""
    gate_decision: str = ""
    approximate: bool = False
    fetched_bytes: int = 0
    request: str = ""
    verification: str = ""
    steps: tuple[StepUsage, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """``tokens.prompt``, as OpenAI's API calls it."""
        return self.tokens.prompt

    @property
    def cached_tokens(self) -> int:
        """``tokens.cached``, as OpenAI's API calls it."""
        return self.tokens.cached

    @property
    def completion_tokens(self) -> int:
        """``tokens.completion``, as OpenAI's API calls it."""
        return self.tokens.completion

    if not TYPE_CHECKING:  # mypy shall find old names

        def __getattr__(self, name: str) -> Any:
            path = _OLD.get(name)
            if path is None:
                raise AttributeError(f"'Usage' has no attribute {name!r}")
            warnings.warn(f"Usage.{name} is now Usage.{path}", DeprecationWarning, stacklevel=2)
            return attrgetter(path)(self)

    def _repr_html_(self) -> str:
        tokens, seconds = self.tokens, self.seconds
        rows: list[tuple[str, object]] = [("prompt tokens", tokens.prompt), ("reused", tokens.cached)]
        rows += [(f"reused from {source}", count) for source, count in tokens.by_source.items()]
        rows += [("computed", tokens.computed), ("generated", tokens.completion)]
        rows += [("of these by another node", tokens.verified)] if tokens.verified else []
        rows += [("seconds to load", seconds.load), ("to fetch", seconds.fetch), ("to compute", seconds.compute)]
        rows += [("why no more was reused", self.why or self.miss_reason)] if self.why or self.miss_reason else []
        return table(("usage", ""), rows)

    def to_wire(self) -> WireUsage:
        """Its form in JSON."""
        tokens, seconds = self.tokens, self.seconds
        return WireUsage(
            tokens.prompt, tokens.cached, tokens.by_source, self.miss_reason, seconds.load, seconds.compute,
            tokens.completion, seconds.fetch, self.fetched_bytes, tokens.by_level, self.approximate, self.request,
            self.why, tokens.relocated, tokens.recomputed, self.gate_decision, tokens.drafted,
            tokens.accepted, seconds.saved, tokens.verified, self.verification, tokens.exited, tokens.disagreed,
            self.steps, tokens.drafted_by_model, tokens.accepted_by_model,
        )  # fmt: skip

    @classmethod
    def from_wire(cls, raw: Any) -> Usage:
        """The usage of a JSON object. Raises msgspec.ValidationError."""
        one = msgspec.convert(raw, WireUsage)
        tokens = TokenUsage(
            one.prompt_tokens, one.cached_tokens, one.completion_tokens, one.by_source, one.by_level, one.relocated,
            one.recomputed, one.drafted, one.accepted, one.verified, one.exited, one.disagreed,
            one.drafted_by_model, one.accepted_by_model,
        )  # fmt: skip
        seconds = UsageSeconds(one.seconds_load, one.seconds_fetch, one.seconds_prefill, one.seconds_saved)
        return cls(
            tokens, seconds, one.missed, one.why, one.gate, one.approx, one.fetched_bytes, one.request, one.verification
        )


class WireUsage(msgspec.Struct, frozen=True, rename={"relocated": "moved", "recomputed": "mended"}):
    """`Usage` in JSON, with the names that faces have used since 0.1."""

    prompt_tokens: int
    cached_tokens: int
    by_source: dict[str, int]
    missed: str = ""
    seconds_load: float = 0.0
    seconds_prefill: float = 0.0
    completion_tokens: int = 0
    seconds_fetch: float = 0.0
    fetched_bytes: int = 0
    by_level: dict[str, int] = {}
    approx: bool = False
    request: str = ""
    why: str = ""
    relocated: int = 0
    recomputed: int = 0
    gate: str = ""
    drafted: int = 0
    accepted: int = 0
    seconds_saved: float = 0.0
    verified: int = 0
    verification: str = ""
    exited: int = 0
    disagreed: int = 0
    steps: tuple[StepUsage, ...] = ()
    drafted_by_model: int = 0
    accepted_by_model: int = 0


#: Fields of 0.1 and what they are now.
_OLD = {
    "approx": "approximate",
    "by_level": "tokens.by_level",
    "by_source": "tokens.by_source",
    "gate": "gate_decision",
    "mended": "tokens.recomputed",
    "missed": "miss_reason",
    "moved": "tokens.relocated",
    "seconds_fetch": "seconds.fetch",
    "seconds_load": "seconds.load",
    "seconds_prefill": "seconds.compute",
}


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Return what several answers to one prompt cost; the first has the prompt, see `RuntimeProtocol.complete_many`."""
    names = (
        "completion", "drafted", "accepted", "exited", "disagreed", "drafted_by_model", "accepted_by_model",
    )  # fmt: skip
    counts = {name: sum(getattr(usage.tokens, name) for usage in usages) for name in names}
    tokens, saved = msgspec.structs.replace(usages[0].tokens, **counts), sum(usage.seconds.saved for usage in usages)
    seconds = msgspec.structs.replace(usages[0].seconds, saved=saved)
    return msgspec.structs.replace(usages[0], tokens=tokens, seconds=seconds)
