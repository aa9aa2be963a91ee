"""KV hints that come without a request to be answered::

    POST /api/kv_hints {"request" | "context", "kv_hints": {"protocol_version", "message_id", "actions": […]}}
                       {"message_id", "accepted", "ignored", "actions": [{"action_id", "outcome"}, …]}

They are on the context of an earlier ``request``, by its id, or on a named ``context`` of this daemon. ``kv_hints`` may
ride on a request of ``/v1/chat/completions`` and ``/v1/completions`` as well: then they are on the context that its
answer leaves, and the answer's header ``x-ctxreuse-kv-hints`` has the counts. See `ctxreuse.pauses.envelope`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from ctxreuse.daemon.middleware import CALLER
from ctxreuse.daemon.openai import ApiError
from ctxreuse.pauses.envelope import HintOrder, KvHints, hint_outcomes, hint_report, read_hints
from ctxreuse.runtime.steps.order import BACKGROUND, NORMAL
from ctxreuse_edge.api.answers import post_route
from ctxreuse_edge.contexts import session_of
from ctxreuse_edge.kv_hints import take_hints

if TYPE_CHECKING:
    from ctxreuse.identity.keys import Tokens
    from ctxreuse_edge.node import EdgeNode

__all__ = ["KvHintsRequest", "routes"]

_Id = Annotated[str, msgspec.Meta(max_length=200)]


class KvHintsRequest(msgspec.Struct, frozen=True):
    """Hints on the context of the ``request`` of that id, or on the ``context`` of that name."""

    kv_hints: KvHints
    request: _Id = ""
    context: _Id = ""


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    def ids_of(body: KvHintsRequest) -> Tokens:
        if bool(body.request) is bool(body.context):
            raise ApiError(400, "either a request or a context is required", param="request")
        if body.context:
            return node.contexts.tokens(session_of(node.ledger, body.context))
        entry = node.runtime.requests.get(body.request)
        if entry is None or entry.space != node.runtime.space.digest or not entry.ids:
            # Unknown, forgotten, of another model, or its texts are not kept.
            raise ApiError(404, "no such request is known", type="not_found_error", code="no_such_request")
        return entry.numbers

    def take(_: Request, body: KvHintsRequest) -> Any:
        ids, orders, runtime = ids_of(body), read_hints(body.kv_hints), node.runtime
        take_hints(node, runtime, orders, ids)
        if len(ids) and _fetches(orders):
            runtime.warm(runtime.request(ids, priority=BACKGROUND, caller=CALLER.get()))
        return hint_report(body.kv_hints, hint_outcomes(orders))

    def priority(body: KvHintsRequest) -> int:
        return BACKGROUND if _fetches(read_hints(body.kv_hints)) else NORMAL

    return [post_route(node, "/api/kv_hints", KvHintsRequest, take, priority)]


def _fetches(orders: list[HintOrder | str]) -> bool:
    return any(isinstance(order, HintOrder) and order.name == "prefetch" for order in orders)
