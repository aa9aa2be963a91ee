"""KV hints in the envelope that vLLM, SGLang, TensorRT-LLM and Dynamo share: read, checked and made. Pure.

An agent runtime or a router sends it as the field ``kv_hints`` of a request, or alone::

    {"protocol_version": "0.1", "message_id": "m1", "actions": [
        {"action_id": "a1", "action_type": "kv.retain", "action_version": "1.0", "payload": {"ttl_seconds": 600}}]}

Its shape: vLLM pull request 53423, SGLang pull request 38891. Payloads: ``kv.retain`` as vLLM and Dynamo write it, the
others as SGLang does; ``kv.pause`` is ours, as none of them has a word for it yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from ctxreuse.errors import ConfigError
from ctxreuse.pauses.hints import hint_label
from ctxreuse.pauses.kinds import kind_of

__all__ = [
    "HINT_OUTCOMES",
    "MAX_ACTIONS",
    "HintOrder",
    "HintReport",
    "KvHintAction",
    "KvHints",
    "hint_outcomes",
    "hint_report",
    "read_hints",
    "retain_hint",
    "summary",
]

#: What becomes of an action: done, or ignored for its ``version``, its unknown ``type``, its malformed ``payload``, or
#: as it names a ``target`` other than the request that it comes with; ``backend``: the server behind takes no hints.
HINT_OUTCOMES: Final = ("accepted", "version", "type", "payload", "target", "backend")

#: Actions of an envelope at most, as in SGLang.
MAX_ACTIONS: Final = 64
#: Largest payload that is read, in bytes.
_PAYLOAD: Final = 1 << 16
#: Longest time that a payload may name, in seconds: 30 days, as in vLLM.
_LONGEST: Final = 30 * 86400.0
#: Priority of what we ask to retain; vLLM's go from 1 to 100.
_PRIORITY: Final = 50

_OrderName: TypeAlias = Literal["pause", "prefetch", "demote", "pin", "retain"]

_TYPES: Final[dict[str, _OrderName]] = {
    "kv.pause": "pause",
    "kv.prefetch": "prefetch",
    "kv.demote": "demote",
    "kv.deref": "demote",
    "kv.evict": "demote",
    "kv.pin": "pin",
    "kv.retain": "retain",
}

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Version = Annotated[str, msgspec.Meta(max_length=32)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=_LONGEST)]


class KvHintAction(msgspec.Struct, frozen=True):
    """One action; ``payload`` is read by those who know its type."""

    action_id: _Name
    action_type: _Name
    action_version: _Version
    # A factory, as a default would be part of the schema, which can be no raw value.
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))


class KvHints(msgspec.Struct, frozen=True):
    """An envelope with its actions, which are independent of each other."""

    protocol_version: _Version
    message_id: _Name
    actions: Annotated[list[KvHintAction], msgspec.Meta(max_length=MAX_ACTIONS)] = []


class HintOrder(NamedTuple):
    """What an action asks for on the context of its request.

    ``seconds``: how long it matters, of a pause how long it lasts (None: not said). ``tokens``: of the context's
    beginning that are retained (None: all). ``kind``: of a pause, see `kind_of`.
    """

    name: _OrderName
    seconds: float | None = None
    tokens: int | None = None
    kind: str = ""

    @property
    def label(self) -> int:
        """The label that the store's policy gets, see `Store.on_pause`."""
        return kind_of(self.kind).label if self.name == "pause" else hint_label(self.name)


class _Directive(msgspec.Struct):
    priority: Annotated[int, msgspec.Meta(ge=0, le=100)]
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    end: Annotated[int, msgspec.Meta(ge=0)] | None = None
    duration: _Seconds | None = None
    covers_output: bool = False


class _Payload(msgspec.Struct):
    session_id: Any = None
    block_hashes: list[msgspec.Raw] | None = None
    include_current_request: bool = False
    ttl_seconds: _Seconds | None = None
    directives: Annotated[list[_Directive], msgspec.Meta(min_length=1, max_length=128)] | None = None
    kind: Annotated[str, msgspec.Meta(max_length=64)] = "tool"
    seconds: _Seconds | None = None


_payload = msgspec.json.Decoder(_Payload)


def read_hints(hints: KvHints) -> list[HintOrder | str]:
    """Return of each action what it asks for, or why it is ignored: one of `HINT_OUTCOMES`."""
    known = _major(hints.protocol_version) in ("0", "1")
    return [_read(action) if known else "version" for action in hints.actions]


def _major(version: str) -> str:
    return version.partition(".")[0]


def _read(action: KvHintAction) -> HintOrder | str:
    name, raw = _TYPES.get(action.action_type), action.payload
    if name is None:
        return "type"
    if _major(action.action_version) != "1":
        return "version"
    try:
        if len(memoryview(raw)) > _PAYLOAD:
            return "payload"
        payload = _payload.decode(raw)
        kind_of(payload.kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError):
        return "payload"
    if payload.session_id is not None or (payload.block_hashes and not payload.include_current_request):
        return "target"
    if name == "pause":
        return HintOrder(name, payload.seconds, kind=payload.kind)
    return _retained(name, payload) if payload.directives is not None else HintOrder(name, payload.ttl_seconds)


def _retained(name: _OrderName, payload: _Payload) -> HintOrder:
    """Return what directives come to. Their priorities fall along the tokens, so that a beginning is retained: here as
    far as the last one with a priority reaches, as long as the longest lasts. Priority 0 lets go."""
    kept = [one for one in payload.directives or () if one.priority]
    if not kept:
        return HintOrder("demote")
    ends = [None if one.covers_output else one.end for one in kept]
    times = [one.duration for one in kept]
    return HintOrder(
        name,
        None if None in times else max(time for time in times if time is not None),
        None if None in ends else max(end for end in ends if end is not None),
    )


class _Outcome(msgspec.Struct, frozen=True):
    action_id: str
    outcome: str


class HintReport(msgspec.Struct, frozen=True):
    """What became of an envelope: how many actions were taken and how many ignored, and of each the outcome."""

    message_id: str
    accepted: int
    ignored: int
    actions: list[_Outcome]


def hint_outcomes(found: Iterable[HintOrder | str]) -> list[str]:
    """Return the outcomes of what `read_hints` found."""
    return [one if isinstance(one, str) else "accepted" for one in found]


def hint_report(hints: KvHints, outcomes: list[str]) -> HintReport:
    """Return the report on an envelope, of the outcomes of its actions."""
    taken, rows = outcomes.count("accepted"), zip(hints.actions, outcomes)
    each = [_Outcome(action.action_id, outcome) for action, outcome in rows]
    return HintReport(hints.message_id, taken, len(each) - taken, each)


def summary(outcomes: Iterable[str]) -> str:
    """Return outcomes as a header has them, such as ``accepted=2, type=1``."""
    counts = Counter(outcomes)
    return ", ".join(f"{name}={counts[name]}" for name in HINT_OUTCOMES if counts[name]) or "accepted=0"


def retain_hint(message: str, seconds: float) -> KvHintAction:
    """Return an action that asks a server to retain a request's context, answer included, for so many seconds."""
    directive = {"start": 0, "end": None, "priority": _PRIORITY, "duration": round(min(seconds, _LONGEST), 3)}
    payload = msgspec.json.encode({"scope": None, "directives": [directive]})
    return KvHintAction(f"{message[:500]}-retain", "kv.retain", "1.0", msgspec.Raw(payload))
