"""Explains the misses of a logged request: reasons, the first difference from an earlier one, advice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from ctxreuse.errors import SessionError
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.store.removals import SHORT_KEY
from ctxreuse.store.types import Removal
from ctxreuse.why.difference import Decode, Difference, divergence, part_at, wording
from ctxreuse.why.explanation import Field, PromptSpan, Why
from ctxreuse.why.log import RequestLog
from ctxreuse.why.misses import shared_blocks
from ctxreuse.why.reasons import advise, because, say
from ctxreuse.why.records import LoggedEntry, PromptPart

__all__ = ["explain"]

# Requests that are looked at closely, and ids of each by which they are compared where no block is shared.
_CLOSE, _LOOK = 24, 512
_FIELDS = {"layers": "layers and pages", "block_tokens": "page length", "rope": "RoPE", "dtype": "KV type"}


def explain(
    log: RequestLog,
    request: str = "",
    *,
    session: str = "",
    tenant: bytes | None = None,
    decode: Decode | None = None,
    others: bool = False,
    emptied: Removal | None = None,
) -> Why:
    """Explain one request of ``log``: that of an id, or the last one (of a ``session``).

    ``tenant``: whose requests the asker may see, as `RequestLog.tenant` names it (None: all). ``decode``: how ids
    become text (None: no words are shown). ``others``: the asker may know that another tenant has computed the same;
    more than that is never said of it. ``emptied``: when the whole store was last lost, if it was. Takes some
    milliseconds. Raises SessionError if there is no such request, or none that the asker may see.
    """
    entry = log.get(request, tenant) if request else log.last(session, tenant)
    if entry is None:
        what = f"no request {request!r} is remembered" if request else "no request is remembered"
        fix = "Send a request to the daemon of this store first; --path names another store"
        if log.last("", tenant) is not None:
            fix = "Only recent ones are; `ctxreuse why --last` explains the newest"
        raise SessionError(what, fix=f"{fix}. Deleting a context or session forgets its requests")
    entry = log.settled(entry)
    before = [e for e in log.entries() if e is not entry and e.at <= entry.at and e.request != entry.request]
    mine = [e for e in before if e.tenant == entry.tenant]
    same = [e for e in mine if e.space == entry.space]
    reason, fields = entry.why, tuple[Field, ...]()
    nearest = _nearest(entry, same)
    difference = None
    if reason in ("new", "space") and not (nearest and shared_blocks(entry, nearest)):
        twin = next((e for e in reversed(mine) if e.space != entry.space and _alike(e, entry)), None)
        if twin is not None:
            reason, fields = "space", _fields(log.space(entry.space), log.space(twin.space))
        elif others and any(e.tenant != entry.tenant and _alike(e, entry) for e in before):
            reason = "tenant"
    if nearest is not None and reason not in ("space", "tenant"):
        difference = _difference(entry, nearest, decode)
    spans = _spans(entry, reason, log, emptied)
    text = say(entry, reason, spans, difference, fields)
    return Why(
        entry.request, entry.at, entry.session, entry.space.hex()[:16], entry.tokens, entry.cached, entry.by_source,
        reason, spans, entry.parts, difference, fields, text, advise(reason, difference, spans), entry.relocated,
        entry.recomputed, entry.gate_decision, entry.reordered, entry.drafts, entry.verified, entry.exits,
    )  # fmt: skip


def _alike(one: LoggedEntry, two: LoggedEntry) -> bool:
    """True if they begin alike whatever model and tenant they are of."""
    return bool(
        (one.first_block and one.first_block == two.first_block and one.unit == two.unit)
        or (one.first_message and one.first_message == two.first_message)
    )


def _nearest(entry: LoggedEntry, before: Sequence[LoggedEntry]) -> LoggedEntry | None:
    """The request that has most in common with ``entry``: the longest beginning, then the same words and session."""
    ranked = sorted(before, key=lambda e: (shared_blocks(entry, e), e.session == entry.session != "", e.at))[-_CLOSE:]
    most = shared_blocks(entry, ranked[-1]) if ranked else 0
    close = [e for e in ranked if shared_blocks(entry, e) == most]
    best: tuple[float, LoggedEntry] | None = None
    for other in close:
        likeness = 0.0
        if entry.ids and other.ids:
            here, there = _prompt(entry), other.numbers
            found = divergence(here, there)
            ahead = slice(found.at, found.at + _LOOK)
            likeness = found.at + len(np.intersect1d(here[ahead], there[ahead])) + found.alike
        likeness += 64 * (other.session == entry.session != "")
        if best is None or likeness >= best[0]:
            best = likeness, other
    return None if best is None else best[1]


def _prompt(entry: LoggedEntry) -> Tokens:
    return entry.numbers[: entry.tokens]


def _difference(entry: LoggedEntry, other: LoggedEntry, decode: Decode | None) -> Difference:
    parts, seconds = entry.parts or (PromptPart("prompt", entry.tokens),), max(0.0, entry.at - other.at)
    if not (entry.ids and other.ids):
        at = shared_blocks(entry, other) * entry.unit
        ended = at >= len(other.keys) // SHORT_KEY * entry.unit
        number, name, start = part_at(parts, min(at, entry.tokens - 1))
        kind: Literal["changed", "grown", "cut"] = "grown" if ended else "changed"
        kind = "cut" if not ended and at >= (entry.tokens - 1) // entry.unit * entry.unit else kind
        return Difference(kind, other.request, seconds, at, False, number, name, max(0, at - start))
    here, there = _prompt(entry), other.numbers
    found = divergence(here, there)
    number, name, start = part_at(parts, min(found.at, entry.tokens - 1))
    answer = found.kind == "changed" and found.at >= other.tokens
    words: tuple[int | None, str, str, str, int, int] = (None, "", "", "", 0, 0)
    if decode is not None:
        words = wording(found, here, there, start, name, decode)
    return Difference(
        found.kind, other.request, seconds, found.at, True, number, name, max(0, found.at - start), *words,
        found.here, found.there, found.alike, answer,
    )  # fmt: skip


def _spans(entry: LoggedEntry, reason: str, log: RequestLog, emptied: Removal | None) -> tuple[PromptSpan, ...]:
    spans: list[PromptSpan] = []
    at = 0
    for miss in entry.misses:
        if miss.start > at:
            spans.append(PromptSpan(at, miss.start, "", text="reused"))
        why = reason if miss.reason in ("new", "space") and reason in ("space", "tenant") else miss.reason
        left, rule = miss.at, miss.rule
        if why == "lost" and emptied is not None and emptied.at <= entry.at:
            left, rule = emptied.at, emptied.why
        by = _whose(entry, miss.by, log)
        spans.append(PromptSpan(miss.start, miss.end, why, left, rule, by, because(why, left, rule, by)))
        at = miss.end
    if at < entry.tokens:
        spans.append(PromptSpan(at, entry.tokens, "", text="reused"))
    return tuple(spans)


def _whose(entry: LoggedEntry, key: bytes, log: RequestLog) -> str:
    """The request of the same tenant that a block belongs to; what others made room for is not said."""
    if not key:
        return ""
    mine = (e for e in log.entries() if e.tenant == entry.tenant)
    return next((e.request for e in mine if _has(e.keys, key)), "")


def _has(keys: bytes, key: bytes) -> bool:
    at = keys.find(key)
    while at > 0 and at % SHORT_KEY:
        at = keys.find(key, at + 1)
    return at >= 0


def _fields(here: ModelSpace | None, there: ModelSpace | None) -> tuple[Field, ...]:
    if here is None or there is None:
        return ()
    found: list[Field] = []
    for name in ModelSpace.__struct_fields__:
        one, two = getattr(here, name), getattr(there, name)
        if one != two:
            found.append(Field(_FIELDS.get(name, name), *_shown(name, one, two)))
    return tuple(found)


def _shown(name: str, one: object, two: object) -> tuple[str, str]:
    if name in ("weights", "tokenizer"):
        return str(one)[:12], str(two)[:12]
    if name == "layers" and isinstance(one, tuple) and isinstance(two, tuple):
        if len(one) != len(two):
            return f"{len(one)} layers", f"{len(two)} layers"
        i = next(i for i, pair in enumerate(zip(one, two)) if pair[0] != pair[1])
        return f"layer {i}: {_plain(one[i])}", f"layer {i}: {_plain(two[i])}"
    if name == "rope":
        return _ropes(str(one), str(two)), _ropes(str(two), str(one))
    return str(one)[:80], str(two)[:80]


def _plain(value: object) -> str:
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":"))[:80]


def _ropes(mine: str, other: str) -> str:
    """Of the rotary parameters those that differ."""
    try:
        one, two = json.loads(mine), json.loads(other)
    except (ValueError, RecursionError):
        return mine[:80]
    if not (isinstance(one, dict) and isinstance(two, dict)):
        return mine[:80]
    return _plain({name: value for name, value in one.items() if two.get(name) != value})
