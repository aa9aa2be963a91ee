"""KV hints that pass the proxy: a caller's own, checked, to backends that take them, and those that it makes itself.

Of a caller's envelope only actions on the caller's own request go on: what names blocks, sessions or other machines
comes from routers, which stand behind the proxy, and would reach other tenants' KV. Alone hints come to
``POST /api/kv_hints`` with the id of a request of the same tenant, and go where that was answered, see
`ctxreuse_edge.api.kv_hints`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from ctxreuse.config import TakesHints
from ctxreuse.errors import FormatError
from ctxreuse.pauses.envelope import MAX_ACTIONS, HintOrder, KvHints, hint_outcomes, read_hints, retain_hint
from ctxreuse_cloud.proxy.request import ProxyRequest, parse_request

__all__ = ["HINTS_PATH", "NO_HINTS", "SentHints", "hints_alone", "read_sent", "sent_to"]

HINTS_PATH = "/api/kv_hints"

#: Version of the envelopes that are made here.
_PROTOCOL = "0.1"
#: Longest pause for which a backend is asked to retain a context, and how much longer than one that was reported.
_LONGEST, _LATE = 600.0, 2.0


class SentHints(NamedTuple):
    """Hints of one request: the caller's envelope (None: none), what each action asks for, and the seconds for which
    its context is likely to wait for a tool (0: no tools)."""

    envelope: KvHints | None = None
    orders: tuple[HintOrder | str, ...] = ()
    pause: float = 0.0


NO_HINTS = SentHints()


class _Alone(msgspec.Struct):
    request: Annotated[str, msgspec.Meta(min_length=1)]
    kv_hints: KvHints


def read_sent(request: ProxyRequest) -> SentHints:
    """Return a request's hints. Raises FormatError for what is no envelope."""
    raw = request.field("kv_hints")
    if raw == b"null":
        return NO_HINTS
    try:
        envelope = msgspec.json.decode(raw, type=KvHints)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"kv_hints: {error}") from None
    return SentHints(envelope, tuple(read_hints(envelope)))


def hints_alone(request: ProxyRequest, tenant: str) -> tuple[str, ProxyRequest]:
    """Return the id of the request that hints are about, and a body with nothing else. Raises FormatError."""
    body = request.only(("request", "kv_hints"), "kv_hints") or b"{}"
    try:
        name = msgspec.json.decode(body, type=_Alone).request
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"hints alone need the id of a request and kv_hints: {error}") from None
    return name, parse_request(body, tenant)


def sent_to(takes: TakesHints, hints: SentHints, identity: str) -> tuple[bytes, list[str], bool]:
    """Return what a backend is sent.

    Args:
        takes: what its settings say.
        hints: of the request.
        identity: of the request, which names what is made here.

    Returns:
        The envelope as JSON (empty: none), the outcomes of the caller's actions, and whether one was made here.
    """
    outcomes = hint_outcomes(hints.orders)
    if takes == "none":
        return b"", ["backend" if one == "accepted" else one for one in outcomes], False
    given = hints.envelope
    actions = [] if given is None else [a for a, one in zip(given.actions, outcomes) if one == "accepted"]
    seconds = _wanted(hints) if takes == "make" and len(actions) < MAX_ACTIONS else 0.0
    if seconds:
        actions.append(retain_hint(identity, seconds))
    if given is None and not actions:
        return b"", outcomes, False
    protocol, message = (given.protocol_version, given.message_id) if given is not None else (_PROTOCOL, identity)
    return msgspec.json.encode(KvHints(protocol, message, actions)), outcomes, seconds > 0


def _wanted(hints: SentHints) -> float:
    """Return the seconds for which a backend is to retain a request's context; 0: the caller has said what becomes of
    it, or nothing is known."""
    orders = [one for one in hints.orders if isinstance(one, HintOrder)]
    if any(one.name in ("retain", "pin", "demote") or one.kind == "closed" for one in orders):
        return 0.0
    reported = [one.seconds for one in orders if one.name == "pause" and one.seconds is not None]
    return min(_LATE * max(reported) if reported else hints.pause, _LONGEST)
