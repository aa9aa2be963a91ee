"""``/api/forget``: delete what is kept of a chat that has no name, and ``/api/compact``: take it out of the files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from ctxreuse.daemon.openai import ApiError
from ctxreuse.identity.keys import as_tokens
from ctxreuse.runtime.steps.order import BACKGROUND
from ctxreuse_edge.api.answers import post_route

if TYPE_CHECKING:
    from ctxreuse.daemon.access import KnownKey
    from ctxreuse_edge.node import EdgeNode

__all__ = ["ForgetRequest", "routes"]

_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class ForgetRequest(msgspec.Struct, frozen=True):
    """What to forget: one of the chat with the ``request`` of that id, all chats that contain ``text``, a ``context``
    by name or id, or ``tokens`` that a program keeps itself, with the requests of its ``session``."""

    request: Annotated[str, msgspec.Meta(max_length=200)] = ""
    text: str = ""
    context: Annotated[str, msgspec.Meta(max_length=200)] = ""
    tokens: list[_Id] = []
    session: Annotated[str, msgspec.Meta(max_length=200)] = ""


class _Compact(msgspec.Struct, frozen=True):
    pass


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    def forget(request: Request, body: ForgetRequest) -> Any:
        given = [name for name in ("request", "text", "context") if getattr(body, name)]
        given += ["tokens"] if body.tokens or body.session else []
        if len(given) != 1:
            raise ApiError(400, "one of request, text, context and tokens is required", param=(given or ["request"])[0])
        if body.request:
            return node.forget.request(body.request)
        if body.text:
            _check_operator(request)
            return node.forget.text(body.text)
        if body.context:
            return node.forget.session(body.context)
        return node.forget.tokens(as_tokens(body.tokens), body.session)

    def compact(_: Request, body: _Compact) -> Any:
        return {"compacted": node.forget.compact()}

    return [
        post_route(node, "/api/forget", ForgetRequest, forget),
        post_route(node, "/api/compact", _Compact, compact, lambda _: BACKGROUND),
    ]


def _check_operator(request: Request) -> None:
    """Raise ApiError (403) for a key that may only ask: by a text, chats of other callers are found, too."""
    known: KnownKey | None = request.scope["state"].get("key")
    if known is not None and not {"status", "admin"} & set(known.key.scopes):
        text = "by a text, chats of all callers are forgotten: this needs a key with the scope status or admin"
        raise ApiError(403, text, type="permission_error", param="text")
