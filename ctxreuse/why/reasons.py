"""The words for misses: every reason with its sentence and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxreuse.why.difference import Difference
    from ctxreuse.why.explanation import Field, PromptSpan
    from ctxreuse.why.records import DraftOutcome, ExitOutcome, LoggedEntry, Reordered, VerifiedOutcome

__all__ = ["REASONS", "advise", "because", "differing", "say", "when"]

#: Why a block had to be computed. ``new`` to ``space`` are found by comparing with earlier requests and with what was
#: removed from the store, the rest are the store's and the link's own words.
REASONS = {
    "new": "no earlier request had these tokens after the same beginning",
    "evicted": "they were stored and were evicted to make room",
    "dropped": "they were stored and were dropped",
    "refused": "they were computed before, and the store did not accept them",
    "disk": "they were computed before, and the store's disk was full or failed when they were to be written",
    "lost": "they were computed before and are not stored; no removal is recorded",
    "running": "another request was computing them at that moment",
    "space": "they were computed in another model space, whose KV is useless to this one",
    "tenant": "another tenant has computed them; tenants share nothing",
    "state": "their blocks are stored, but not the state at this position from which the model could continue",
    "level": "they are stored at a level that this request does not allow",
    "card": "they are stored in an encoding whose calibration profile is missing here",
    "slow": "they are stored, and reading them would take longer than computing them",
    "gate": "they are stored at another position, and relocating them costs more KL than this request allows",
    "probe": "they are stored at another position, and deviated there by more than is known to be harmless",
    "link": "the link to the node that has them was cut or became too slow",
    "audit": "the node that sent them failed the audit",
    "unaudited": "the audit of what another node sent could not be run",
    "corrupt": "the stored block was damaged, and was dropped",
    "truncated": "the stored block was cut short, and was dropped",
    "foreign": "the stored block belonged to something else, and was dropped",
    "older": "the stored block has the format of an older version",
    "newer": "the stored block has the format of a newer version",
    "tokens": "the block stored under their key was of other tokens",
    "unreadable": "the disk failed",
    "no store": "there is no store, and they were not in the engine's memory any more",
    "absent": "they are not stored",
    "tail": "a block is reused whole or not at all, and the last token is always computed",
}

_DROPPED = {
    "forgotten": "they were forgotten on request",
    "rebuilt": "the cache was rebuilt after it was not closed cleanly",
    "corrupt": "they, or what they follow, were damaged",
    "truncated": "they, or what they follow, were cut short",
    "audit": "they, or what they follow, came from a node that failed an audit",
}
_REFUSED = {
    "queue_full": "too much was waiting to be written",
    "orphan": "the block that they follow was not stored",
    "too_big": "a block is larger than the whole store",
    "no_room": "everything else is pinned or in use",
    "declined": "the store was full of blocks that are expected to be needed sooner",
    "backoff": "the disk had just been full or failed",
    "disk": "the disk was full or failed",
    "readonly": "it was open for reading only",
    "closed": "it was closed",
}

#: Why a draft of an answer was short or missing.
_DRAFTS = {
    "match": "nothing that was said before goes on so",
    "cost": "checking more would have cost more than it promised",
    "lost": "drafts had cost so much already that another wrong one was too much",
    "unknown": "what a pass costs was not known yet, or not known well any more",
    "grammar": "the grammar forbids how it goes on",
    "end": "the answer was about to reach its longest",
    "state": "a model with recurrent or windowed layers cannot forget a wrong draft, so none is made",
}

#: Why an answer, or its rest, was decoded here.
_LOCAL = {
    "cut": "the link was cut",
    "stalled": "the cloud said nothing for too long",
    "down": "no cloud that decodes for this tokenizer was connected",
    "busy": "the cloud decoded too many answers already",
    "drain": "the cloud was stopping",
    "failed": "the cloud's engine failed",
    "tokens": "the prompt and the answer do not fit the cloud's model",
    "space": "the cloud does not decode for this model any more",
    "judge": "the judge of its steps failed, or is not trusted: too often it put wrong ones above right ones",
    "state": "a model with recurrent or windowed layers cannot forget a wrong step",
}

#: Why a token of an answer did not leave the model early.
_EXITS = {
    "unknown": "too few tokens had been verified since the start",
    "worthless": "no ramp saves anything within the budget",
    "spent": "as many as the budget allows had left and were wrong, or not verified yet",
    "score": "no ramp was sure enough",
    "pending": "so many were not verified that a full pass was due",
    "batch": "the pass went on for other answers",
    "draft": "the pass checked a draft",
    "sampled": "the answer is drawn, or its tokens are penalised or biased, and a ramp knows only the likeliest one",
    "grammar": "the answer has a grammar, and a ramp does not know it",
    "logprobs": "log-probabilities were requested, and a ramp does not know them",
    "callers": "too many callers had spent some of their budgets",
}

_ADVICE = {
    "evicted": "Give the store more room (store.capacity), or pin what has to stay.",
    "refused": "See ctxreuse_store_refused_puts_total: the disk is too slow or the store too small for the load.",
    "disk": "Make room on the store's disk: what is in memory (ctxreuse_store_unwritten_bytes) is then written.",
    "lost": "Close the store cleanly: blocks that wait to be written are lost when a process is killed.",
    "running": "Warm a context once before many requests with it start at the same time.",
    "space": "Use one model, numeric type and page length for what should be shared.",
    "tenant": "Only requests of the same tenant share KV, by design.",
    "state": "Name the positions where contexts branch (branches=), so that states are stored there.",
    "level": "Allow some KL (max_kl=), or keep it exact (store.level).",
    "card": "Get the calibration profile of that level: see `ctxreuse codec ls` and `ctxreuse calibrate`.",
    "gate": "Allow a larger KL (max_kl=), or measure the model: `ctxreuse calibrate NAME --chunks`.",
    "link": "Look at the link: ctxreuse_link_bytes_per_second.",
    "unreadable": "Look at the disk and at the log.",
    "no store": "Open a store: KV then outlives the engine's memory.",
}


def when(at: float) -> str:
    """Return a time of day, with its date if that is not today's."""
    try:
        then, today = time.localtime(at), time.localtime()
        return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", then)
    except (OverflowError, ValueError, OSError):
        return "at some time"


def because(reason: str, at: float, rule: str, by: str) -> str:
    """Say why one run of tokens was computed."""
    if reason == "evicted":
        text = f"evicted {when(at)}"
        text += " when the store's capacity was lowered" if rule == "capacity" else f" by {rule}" if rule else ""
        return text + (f", to make room for {by}" if by else ", to make room" if rule != "capacity" else "")
    if reason == "dropped":
        return f"dropped {when(at)}: {_DROPPED.get(rule, rule)}"
    if reason in ("refused", "disk") and at:
        return f"never stored: when it was offered at {when(at)}, {_REFUSED.get(rule, rule)}"
    if reason == "lost" and at:
        return f"lost {when(at)}: {_DROPPED.get(rule, rule)}"
    return REASONS.get(reason, reason)


def say(
    entry: LoggedEntry, reason: str, spans: Sequence[PromptSpan], difference: Difference | None, fields: Sequence[Field]
) -> str:
    """Return the whole explanation as plain sentences, one a line."""
    tiers = ", ".join(f"{tokens:,} from {source}" for source, tokens in entry.by_source.items() if tokens)
    lines = [f"{entry.cached:,} of {entry.tokens:,} prompt tokens were reused{f' ({tiers})' if tiers else ''}."]
    if entry.gate_decision:
        again = f"; {entry.recomputed:,} more were recomputed" if entry.recomputed else ""
        reused = f"{entry.relocated:,} of these were relocated from other positions" if entry.relocated else ""
        lines.append(f"{reused or 'None were relocated'}{again} ({entry.gate_decision}).")
    if entry.reordered is not None:
        lines.append(_reordering(entry.reordered))
    if not reason and entry.verified is None:
        lines.append("There was no miss: the rest does not fill a block, or is the last token.")
    for span in spans:
        if span.reason and span.reason != "tail":
            count = f"Tokens {span.start:,} to {span.end - 1:,} were computed"
            lines.append(f"{count}: {because(span.reason, span.at, span.rule, span.by)}.")
    if entry.verified is not None:
        lines.append(_verified(entry.verified))
    if entry.drafts is not None:
        lines.append(_drafting(entry.drafts))
    if entry.exits is not None:
        lines.append(_exiting(entry.exits))
    if fields:
        named = ", ".join(f"{field.name} ({field.here} here, {field.there} there)" for field in fields)
        lines.append(f"What differs: {named}.")
    if difference is not None and any(span.reason == "new" for span in spans):
        lines += differing(difference)
    return "\n".join(lines)


def _reordering(made: Reordered) -> str:
    order = ", ".join(str(index + 1) for index in made.order)
    text = f"The {len(made.order)} documents were put into the order {order}"
    if made.cached <= made.as_given:
        return f"{text}, so that later requests can share more; now nothing is saved by that."
    return f"{text}: KV of {made.cached:,} tokens was cached for it, of {made.as_given:,} as given."


def _verified(made: VerifiedOutcome) -> str:
    text = f"A cloud's model said {made.tokens:,} tokens of the answer"
    if made.steps:
        text += f" and accepted {made.accepted:,} of {made.steps:,} steps"
    if made.reason == "steps":
        return f"{text}."
    if made.reason == "cloud":
        return f"{text}, all of it."
    return f"{text}; the rest is of the model here, because {_LOCAL.get(made.reason, made.reason)}."


def _drafting(made: DraftOutcome) -> str:
    reasons = sorted(made.short.items(), key=lambda one: -one[1])
    why = "; ".join(f"{_DRAFTS.get(reason, reason)} ({count:,} times)" for reason, count in reasons)
    text = "No draft of the answer was checked"
    if made.drafted:
        text = f"Of {made.drafted:,} drafted tokens of the answer {made.accepted:,} were right, which "
        text += f"{'saved' if made.saved >= 0 else 'cost'} {abs(made.saved):.2f} s"
    if made.drafted_by_model:
        text += f"; a draft model drafted {made.drafted_by_model:,} of them, {made.accepted_by_model:,} right"
    return f"{text}. Drafts were short or missing because: {why}." if why else f"{text}."


def _exiting(made: ExitOutcome) -> str:
    reasons = sorted(made.refused.items(), key=lambda one: -one[1])
    why = "; ".join(f"{_EXITS.get(reason, reason)} ({count:,} times)" for reason, count in reasons)
    text = "No token of the answer left the model early"
    if made.exited:
        text = f"{made.exited:,} tokens of the answer left the model early; the whole model would have said another in "
        text += f"place of {made.disagreed:,} of the {made.verified:,} verified ones (budget: {made.budget:.1%} of all "
        text += f"tokens), which {'saved' if made.saved >= 0 else 'cost'} {abs(made.saved):.2f} s"
    return f"{text}. Others did not leave because: {why}." if why else f"{text}."


def differing(found: Difference) -> list[str]:
    """Return the first difference in sentences; lines that begin with blanks show the words."""
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
        lines.append("That place was the other request's answer: it came back different from what was generated.")
    return lines


def _ago(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def advise(reason: str, difference: Difference | None, spans: Sequence[PromptSpan]) -> str:
    """Return advice; "" if there is nothing to do."""
    if reason in _ADVICE:
        return _ADVICE[reason]
    if reason == "dropped":
        why = next((span.rule for span in spans if span.reason == "dropped"), "")
        return _ADVICE["lost"] if why == "rebuilt" else ""
    if reason != "new" or difference is None or difference.kind != "changed":
        return ""
    if difference.answer:
        return "Send the answer back unchanged: token ids, or the text with nothing trimmed or reformatted."
    if difference.alike >= 64:
        return (
            "Move what changes behind what stays: dates, ids and counters at the end of the prompt, or into the last "
            "message."
        )
    return ""
