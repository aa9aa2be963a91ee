"""The explanation of a request's misses, as faces show it."""

from __future__ import annotations

import msgspec

from ctxreuse.html import table
from ctxreuse.why.difference import Difference
from ctxreuse.why.records import DraftOutcome, ExitOutcome, PromptPart, Reordered, VerifiedOutcome

__all__ = ["Field", "PromptSpan", "Why"]


class PromptSpan(msgspec.Struct, frozen=True):
    """Tokens ``start`` to ``end`` of the prompt.

    Attributes:
        reason: "" if they were reused, ``tail`` for what fills no block (never reused), else why they were computed.
        at: when they were removed from the store (seconds since 1970; 0: they were not).
        rule: by which rule or for what cause.
        by: the request that needed the room, if it is known and of the same tenant.
        text: all this in a sentence.
    """

    start: int
    end: int
    reason: str
    at: float = 0.0
    rule: str = ""
    by: str = ""
    text: str = ""


class Field(msgspec.Struct, frozen=True):
    """A property of the model space that differs: ``here`` of this request's, ``there`` of the other's."""

    name: str
    here: str
    there: str


class Why(
    msgspec.Struct,
    frozen=True,
    rename={"relocated": "moved", "recomputed": "mended", "gate_decision": "gate"},
):
    """Why a request reused what it did and no more.

    Attributes:
        request, session: its id, and the conversation it belongs to.
        at: seconds since 1970.
        space: beginning of the model space's digest.
        prompt_tokens, cached_tokens, by_source, relocated, recomputed, gate_decision: see `ctxreuse.usage`.
        reason: of the first block that had to be computed; "" if all blocks were reused.
        spans: cover the prompt.
        parts: of the prompt.
        difference: from the earlier request that it has most in common with.
        fields: what differs, where the same text was computed in another model space.
        text: the whole in sentences.
        advice: what to do about it ("": nothing).
        reordered: how its documents were reordered (None: they stand as given).
        drafts: what the drafts of its answer came to (None: none were wanted).
        verified: what another node decoded of its answer (None: nothing was to be).
        exits: what became of its answer's early exits (None: none were wanted).
    """

    request: str
    at: float
    session: str
    space: str
    prompt_tokens: int
    cached_tokens: int
    by_source: dict[str, int]
    reason: str
    spans: tuple[PromptSpan, ...]
    parts: tuple[PromptPart, ...] = ()
    difference: Difference | None = None
    fields: tuple[Field, ...] = ()
    text: str = ""
    advice: str = ""
    relocated: int = 0
    recomputed: int = 0
    gate_decision: str = ""
    reordered: Reordered | None = None
    drafts: DraftOutcome | None = None
    verified: VerifiedOutcome | None = None
    exits: ExitOutcome | None = None

    def _repr_html_(self) -> str:
        rows = [(f"{span.start:,} to {span.end:,}", span.reason or "reused", span.text) for span in self.spans]
        caption = f"{self.cached_tokens:,} of {self.prompt_tokens:,} tokens reused. {self.text} {self.advice}"
        return table(("tokens", "reason", "what happened"), rows, caption)
