"""The words for misses: every reason with its sentence and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxreuse.why.difference import Difference
    from ctxreuse.why.explain import Field, Span
    from ctxreuse.why.records import Entry

__all__ = ["REASONS", "advise", "because", "differing", "say", "when"]

#: Why a block had to be computed. ``new`` to ``space`` are found by comparing with earlier requests and with what left
#: the store, the rest are the store's and the link's own words.
REASONS = {
    "new": "no earlier request had these tokens after the same beginning",
    "evicted": "they were held and were evicted to make room",
    "dropped": "they were held and were dropped",
    "refused": "they were computed before, and the store did not take them",
    "lost": "they were computed before and are not held; what became of them is not recorded",
    "running": "another request was computing them at that moment",
    "space": "they were computed in another model space, whose KV means nothing to this one",
    "tenant": "another tenant has computed them; tenants share nothing",
    "state": "their blocks are held, but not the state at this position from which the model could go on",
    "level": "they are held at a level that this request does not allow",
    "card": "they are held in a code whose card is not here",
    "slow": "they are held, and reading them would take longer than computing them",
    "gate": "they are held at another position, and this request does not allow what moving them is measured to cost",
    "probe": "they are held at another position, and deviated there by more than has been measured to be harmless",
    "link": "the link to the node that holds them was cut or became too slow",
    "audit": "the node that sent them sent what is wrong",
    "corrupt": "what was held was damaged, and was dropped",
    "truncated": "what was held was cut short, and was dropped",
    "foreign": "what was held belonged to something else, and was dropped",
    "older": "what was held has the format of an older version",
    "newer": "what was held has the format of a newer version",
    "tokens": "what was held under their name was of other tokens",
    "unreadable": "the disk failed",
    "no store": "there is no store, and they were not in the engine's memory any more",
    "absent": "they are not held",
    "tail": "a block is reused whole or not at all, and the last token is always computed",
}

_DROPPED = {
    "forgotten": "somebody had them forgotten",
    "rebuilt": "the cache was rebuilt after it was not closed cleanly",
    "corrupt": "they, or what they follow, were damaged",
    "truncated": "they, or what they follow, were cut short",
    "audit": "they, or what they follow, came from a node that sent what is wrong",
}
_REFUSED = {
    "queue_full": "too much was waiting to be written",
    "orphan": "the block that they follow was not held",
    "too_big": "a block is larger than the whole store",
    "no_room": "everything else is pinned or in use",
    "declined": "the store was full of what is expected to be needed sooner",
    "backoff": "the disk had just failed",
    "disk": "the disk failed",
    "readonly": "it was open for reading only",
    "closed": "it was closed",
}

_ADVICE = {
    "evicted": "Give the store more room (store.capacity), or pin what has to stay.",
    "refused": "See ctxreuse_store_refused_puts_total: the disk is too slow or the store too small for what comes.",
    "lost": "Close the store cleanly: what still waits to be written when a process is killed is lost.",
    "running": "Warm a context once before many requests with it start at the same time.",
    "space": "Use one model, numeric type and page length for what should be shared.",
    "tenant": "Only requests of the same tenant share KV; that is by design.",
    "state": "Say where contexts branch (branches=), so that states are kept there.",
    "level": "Allow a level (lossy=), or keep it exact (store.level).",
    "card": "Get the card of that level: see `ctxreuse codec ls` and `ctxreuse calibrate`.",
    "gate": "Allow a worse level (lossy=), or measure the model: `ctxreuse calibrate NAME --chunks`.",
    "link": "Look at the link: ctxreuse_link_bytes_per_second.",
    "unreadable": "Look at the disk and at the log.",
    "no store": "Open a store: KV then outlives the engine's memory.",
}


def when(at: float) -> str:
    """A time of day, with its date if that is not today's."""
    try:
        then, today = time.localtime(at), time.localtime()
        return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", then)
    except (OverflowError, ValueError, OSError):
        return "at some time"


def because(reason: str, at: float, rule: str, by: str) -> str:
    """Why one run of tokens was computed."""
    if reason == "evicted":
        text = f"evicted {when(at)}"
        text += " when the store's capacity was lowered" if rule == "capacity" else f" by {rule}" if rule else ""
        return text + (f", to make room for {by}" if by else ", to make room" if rule != "capacity" else "")
    if reason == "dropped":
        return f"dropped {when(at)}: {_DROPPED.get(rule, rule)}"
    if reason == "refused":
        return f"never stored: when it was offered at {when(at)}, {_REFUSED.get(rule, rule)}"
    if reason == "lost" and at:
        return f"lost {when(at)}: {_DROPPED.get(rule, rule)}"
    return REASONS.get(reason, reason)


def say(
    entry: Entry, reason: str, spans: Sequence[Span], difference: Difference | None, fields: Sequence[Field]
) -> str:
    """The whole explanation as plain sentences, one a line."""
    held = ", ".join(f"{tokens:,} from {source}" for source, tokens in entry.by_source.items() if tokens)
    lines = [f"{entry.cached:,} of {entry.tokens:,} prompt tokens were reused{f' ({held})' if held else ''}."]
    if entry.gate:
        again = f", and computed {entry.mended:,} more of them again" if entry.mended else ""
        moving = f"Moved {entry.moved:,} of these from other positions{again}" if entry.moved else "None were moved"
        lines.append(f"{moving} ({entry.gate}).")
    if not reason:
        lines.append("Nothing was missed: the rest does not fill a block, or is the last token.")
    for span in spans:
        if span.reason and span.reason != "tail":
            count = f"Tokens {span.start:,} to {span.end - 1:,} were computed"
            lines.append(f"{count}: {because(span.reason, span.at, span.rule, span.by)}.")
    if fields:
        named = ", ".join(f"{field.name} ({field.here} here, {field.there} there)" for field in fields)
        lines.append(f"What differs: {named}.")
    if difference is not None and any(span.reason == "new" for span in spans):
        lines += differing(difference)
    return "\n".join(lines)


def differing(found: Difference) -> list[str]:
    """The first difference in sentences; lines that begin with blanks show the words."""
    who = f"the nearest earlier request, {found.request} ({_ago(found.seconds)} before)"
    if found.kind == "grown":
        return [f"Up to token {found.token:,} it equals {who}, answer included; what follows is new."]
    if found.kind == "cut":
        return [f"It is a beginning of {who}."]
    place = f"in part {found.part}" + (f", {found.name}" if found.name else "")
    place += f", at its token {found.part_token:,}" + ("" if found.exact else " or up to a block behind that")
    place += f" and character {found.character:,}" if found.character is not None else ""
    lines = [f"It differs from {who} first at token {found.token:,}: {place}."]
    if found.here or found.there:
        lines.append(
            f"  here:  …{found.before[-40:]}[{found.here[: found.changed]}]{found.here[found.changed :][:40]}…"
        )
        there = f"[{found.there[: found.other_changed]}]{found.there[found.other_changed :][:40]}"
        lines.append(f"  there: …{found.before[-40:]}{there}…")
    if found.alike:
        lines.append(f"After {found.here_tokens:,} changed tokens, {found.alike:,} are the same again.")
    if found.answer:
        lines.append("That place was the other request's answer: it came back otherwise than it was generated.")
    return lines


def _ago(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def advise(reason: str, difference: Difference | None, spans: Sequence[Span]) -> str:
    """What to do about it; "" if there is nothing to do."""
    if reason in _ADVICE:
        return _ADVICE[reason]
    if reason == "dropped":
        why = next((span.rule for span in spans if span.reason == "dropped"), "")
        return _ADVICE["lost"] if why == "rebuilt" else ""
    if reason != "new" or difference is None or difference.kind != "changed":
        return ""
    if difference.answer:
        return "Send the answer back as it was given: token ids, or the text with nothing trimmed or formatted anew."
    if difference.alike >= 64:
        return (
            "Move what changes behind what stays: dates, ids and counters at the end of the prompt, or into the last "
            "message."
        )
    return ""
