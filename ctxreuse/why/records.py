"""What is logged of a request, so that it and later ones can explain their misses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.store.removals import SHORT_KEY

__all__ = [
    "DraftOutcome",
    "ExitOutcome",
    "LogHead",
    "LoggedEntry",
    "MissSpan",
    "PromptPart",
    "Reordered",
    "RequestInfo",
    "VerifiedOutcome",
    "decoded",
    "encoded",
]


class PromptPart(msgspec.Struct, frozen=True, array_like=True):
    """One part of a prompt: its ``name`` (a role, or what its caller calls it) and the token position where it ends."""

    name: str
    end: int


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class Reordered(msgspec.Struct, frozen=True, array_like=True):
    """How a planner ordered a prompt's documents: ``order`` has their numbers as given, from 0, in their present order.
    For it ``cached`` tokens of KV were there, for the order given ``as_given``."""

    order: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=4096)]
    cached: _Count
    as_given: _Count


class RequestInfo(msgspec.Struct, frozen=True, rename={"client_id": "alias", "first_message": "opening"}):
    """What a caller says of a request.

    Attributes:
        request: its id ("": one is made).
        client_id: another id for it, by its client.
        session: the conversation it belongs to.
        parts: of the prompt, in order (none: it is one part).
        first_message: the text of the first part, by which the request is recognised in other model spaces; only a
            keyed hash of it is kept.
        reordered: how its documents were reordered (None: they stand as given).
    """

    request: str = ""
    client_id: str = ""
    session: str = ""
    parts: tuple[PromptPart, ...] = ()
    first_message: str = ""
    reordered: Reordered | None = None


class DraftOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What the drafts of an answer came to, see `ctxreuse.speculate`.

    Attributes:
        drafted, accepted: tokens of drafts that were checked, and of these right.
        saved: seconds that they saved; below 0: that they cost.
        short: how often a draft was short or missing, by reason, see `AnswerDrafter`; ``state``: the model cannot
            forget a wrong one.
        drafted_by_model, accepted_by_model: of the tokens, those that a draft model drafted.
    """

    drafted: _Count = 0
    accepted: _Count = 0
    saved: float = 0.0
    short: dict[str, _Count] = {}
    drafted_by_model: _Count = 0
    accepted_by_model: _Count = 0

    def __add__(self, other: DraftOutcome) -> DraftOutcome:
        short = {name: self.short.get(name, 0) + other.short.get(name, 0) for name in {**self.short, **other.short}}
        return DraftOutcome(
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.saved + other.saved,
            short,
            self.drafted_by_model + other.drafted_by_model,
            self.accepted_by_model + other.accepted_by_model,
        )


class VerifiedOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Of an answer that another node decoded or judged: its ``tokens`` that came from there, the ``reason`` of
    `Usage.verification`, and how many ``steps`` this node wrote, of which so many were ``accepted``."""

    tokens: _Count
    reason: Annotated[str, msgspec.Meta(max_length=32)]
    steps: _Count = 0
    accepted: _Count = 0


class ExitOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of the tokens of an answer that could leave the model early, see `ctxreuse.exits`.

    Attributes:
        exited, verified, disagreed: tokens that left, of these verified, and of these other than the model's own.
        budget: the share of tokens that may be.
        saved: seconds that they saved; below 0: that they cost.
        refused: how often a token did not leave, by reason, see `ExitGate` and `Exiting`; a longer one is the engine's.
    """

    exited: _Count = 0
    verified: _Count = 0
    disagreed: _Count = 0
    budget: float = 0.0
    saved: float = 0.0
    refused: dict[str, _Count] = {}

    def __add__(self, other: ExitOutcome) -> ExitOutcome:
        both = {**self.refused, **other.refused}
        return ExitOutcome(
            self.exited + other.exited,
            self.verified + other.verified,
            self.disagreed + other.disagreed,
            max(self.budget, other.budget),
            self.saved + other.saved,
            {name: self.refused.get(name, 0) + other.refused.get(name, 0) for name in both},
        )


class MissSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``start`` to ``end`` were computed, because of ``reason`` (see `ctxreuse.why.reasons`).

    ``at``, ``rule``, ``by``: when the stored block was removed, by which rule, and the beginning of the key that needed
    the room; 0 and "" where it was not.
    """

    start: int
    end: int
    reason: str
    at: float = 0.0
    rule: str = ""
    by: bytes = b""


class LoggedEntry(msgspec.Struct, array_like=True, tag="request"):
    """One logged request.

    Attributes:
        request, client_id, session: see `RequestInfo`.
        at: seconds since 1970.
        tenant: a hash.
        space: digest of the model space.
        unit: tokens of a block.
        tokens, cached, by_source: of the prompt, see `TokenUsage`.
        why: see ``Usage.why``.
        lossy: the name of the request's ``max_kl``; None: exact KV only.
        parts, misses: of the prompt.
        first_block, first_message: keyed hashes of the first block's ids and of the first part's text, equal in all
            model spaces and for all tenants.
        keys: the first 8 bytes of each prefix key, answer included.
        ids: all token ids, little-endian int32; empty where texts are not kept.
        relocated, recomputed, gate_decision: see `Usage`.
        reordered: see `RequestInfo`.
        drafts: what drafts of its answers came to (None: none were wanted).
        verified: what another node decoded of its answer (None: nothing was to be).
        exits: what became of its answers' early exits (None: none were wanted).
    """

    request: str
    client_id: str
    session: str
    at: float
    tenant: bytes
    space: bytes
    unit: int
    tokens: int
    cached: int
    by_source: dict[str, int]
    why: str
    lossy: str | None
    parts: tuple[PromptPart, ...]
    misses: tuple[MissSpan, ...]
    first_block: bytes
    first_message: bytes
    keys: bytes = b""
    ids: bytes = b""
    relocated: int = 0
    recomputed: int = 0
    gate_decision: str = ""
    reordered: Reordered | None = None
    drafts: DraftOutcome | None = None
    verified: VerifiedOutcome | None = None
    exits: ExitOutcome | None = None

    @property
    def nbytes(self) -> int:
        """Approximate bytes in memory."""
        order = len(self.reordered.order) if self.reordered is not None else 0
        return 1000 + len(self.keys) + len(self.ids) + 100 * (len(self.parts) + len(self.misses)) + 8 * order

    @property
    def numbers(self) -> Tokens:
        """Its token ids, int32 [n]; none where they are not kept."""
        return np.frombuffer(self.ids, "<i4")

    def named(self, name: str) -> bool:
        """Return True if ``name`` is one of its ids."""
        return bool(name) and name in (self.request, self.client_id)


class LogHead(msgspec.Struct, array_like=True, tag="head"):
    """What the requests in a file refer to: the key of their marks, and the model spaces that computed them."""

    secret: bytes
    spaces: tuple[ModelSpace, ...] = ()


#: Most reasons for which drafts are short, and characters of one for which a token did not leave early.
_SHORT, _LONG = 16, 1024
_record = msgspec.msgpack.Decoder(LoggedEntry | LogHead)


def encoded(record: LoggedEntry | LogHead) -> bytes:
    """Its bytes in a file."""
    return msgspec.msgpack.encode(record)


def decoded(raw: bytes, path: Path) -> LoggedEntry | LogHead:
    """Read a record. Raises FormatError, with advice, for bytes that this version did not write."""
    try:
        record: LoggedEntry | LogHead = _record.decode(raw)
        fault = (
            _fault(record) if isinstance(record, LoggedEntry) else "" if len(record.secret) == 16 else "a short secret"
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
        fault = str(error)
    if fault:
        fix = "Delete the file: nothing but explanations of past misses is lost"
        raise FormatError(f"the record of requests is wrong: {fault}", where=str(path), fix=fix)
    return record


def _fault(entry: LoggedEntry) -> str:
    """What is impossible about an entry; "" if nothing is."""
    n, ends = entry.tokens, [0, *(part.end for part in entry.parts)]
    spans = [edge for miss in entry.misses for edge in (miss.start, miss.end)]
    if not (1 <= entry.unit <= 1 << 20 and 0 <= entry.cached <= n <= 1 << 31 and math.isfinite(entry.at)):
        return "a number out of range"
    if ends != sorted(ends) or ends[-1] > n or any(part.end < 1 for part in entry.parts):
        return "parts out of order"
    if spans != sorted(spans) or any(not 0 <= edge <= n for edge in spans):
        return "spans out of order"
    if (
        len(entry.keys) % SHORT_KEY
        or len(entry.ids) % 4
        or {len(entry.first_block), len(entry.first_message)} - {0, SHORT_KEY}
    ):
        return "keys or ids of another size"
    if min(entry.relocated, entry.recomputed) < 0 or entry.relocated > entry.cached:
        return "more relocated than reused"
    if entry.ids and (len(entry.ids) < 4 * n or int(entry.numbers.min()) < 0):
        return "ids out of range"
    if any(not math.isfinite(miss.at) for miss in entry.misses):
        return "a time that is not finite"
    if entry.drafts is not None and not (math.isfinite(entry.drafts.saved) and len(entry.drafts.short) <= _SHORT):
        return "drafts out of range"
    exits = entry.exits
    if exits is not None and not (
        math.isfinite(exits.saved)
        and 0 <= exits.budget <= 1
        and exits.disagreed <= exits.verified <= exits.exited
        and len(exits.refused) <= _SHORT
        and all(len(reason) <= _LONG for reason in exits.refused)
    ):
        return "exits out of range"
    return ""
