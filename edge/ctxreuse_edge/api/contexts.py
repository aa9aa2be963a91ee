"""``/api/contexts``: named contexts, computed in advance and kept until they are deleted.

::

    POST   /api/contexts               {"name"?, "messages" | "text", "pin"?}   201 {"context", "usage"}
    GET    /api/contexts?limit=50                                               {"contexts": […], "total"}
    GET    /api/contexts/NAME                                                   {"context"}
    DELETE /api/contexts/NAME                                                   {"blocks"}
    POST   /api/contexts/NAME/pin, /api/contexts/NAME/unpin                     {"context"}

A chat request continues one with ``"context": NAME``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.openai import ApiError, ChatMessage, usage_of
from ctxreuse.errors import SessionError
from ctxreuse.runtime.steps.order import BACKGROUND
from ctxreuse_edge.api.answers import body_of, json_answer
from ctxreuse_edge.export import export_context

if TYPE_CHECKING:
    from ctxreuse_edge.contexts import NamedContext
    from ctxreuse_edge.node import EdgeNode

__all__ = ["NewContext", "routes"]

T = TypeVar("T")

_MAX_LIMIT, _MAX_OFFSET = 1000, 10**9


class NewContext(msgspec.Struct, frozen=True):
    """A context to create, of ``messages`` or a plain ``text``."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    messages: list[ChatMessage] = []
    text: str | None = None
    pin: bool = False


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    async def used(work: Callable[[], T]) -> T:
        return await node.pool.call(lambda: node.models.use_first(work))

    async def create(request: Request) -> Response:
        body = await body_of(request, node, NewContext)
        if bool(body.messages) == bool(body.text):
            raise ApiError(400, "either messages or a text is required", param="messages")
        messages = [m.message(f"messages[{i}].content") for i, m in enumerate(body.messages)]
        try:
            made, usage = await node.pool.call(
                lambda: node.contexts.create(body.name, messages, body.text, pin=body.pin), BACKGROUND
            )
        except SessionError as error:  # a name that is taken or invalid
            raise ApiError(409, str(error), code="context_name", param="name") from None
        return json_answer({"context": _plain(made), "usage": usage_of(usage)}, 201)

    async def listing(request: Request) -> Response:
        limit = _number(request, "limit", 50, 1, _MAX_LIMIT)
        offset = _number(request, "offset", 0, 0, _MAX_OFFSET)
        prefix = request.query_params.get("prefix", "")
        found = await used(lambda: node.contexts.newest(limit, offset, prefix=prefix))
        return json_answer({"contexts": [_plain(one) for one in found], "total": node.contexts.count()})

    async def one(request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "DELETE":
            return json_answer({"blocks": (await used(lambda: node.forget.session(name))).blocks})
        return json_answer({"context": _plain(await used(lambda: node.contexts.get(name)))})

    async def export(request: Request) -> Response:
        name = request.path_params["name"]
        return json_answer(await used(lambda: export_context(node, name)))

    async def pin(request: Request) -> Response:
        name, verb = request.path_params["name"], request.path_params["verb"]
        if verb not in ("pin", "unpin"):
            raise ApiError(404, f"no such action: {verb!r}", code="no_such_route")
        work = node.contexts.pin if verb == "pin" else node.contexts.unpin
        return json_answer({"context": _plain(await node.pool.call(lambda: work(name), BACKGROUND))})

    return [
        Route("/api/contexts", create, methods=["POST"]),
        Route("/api/contexts", listing, methods=["GET"]),
        Route("/api/contexts/{name}", one, methods=["GET", "DELETE"]),
        Route("/api/contexts/{name}/export", export, methods=["GET"]),
        Route("/api/contexts/{name}/{verb}", pin, methods=["POST"]),
    ]


def _number(request: Request, name: str, default: int, minimum: int, maximum: int) -> int:
    """Return a number of the query. Raises ApiError."""
    text = request.query_params.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not minimum <= int(text[:10]) <= maximum:
        raise ApiError(400, f"{name} must be a number from {minimum} to {maximum}", param=name)
    return int(text)


def _plain(context: NamedContext) -> dict[str, Any]:
    return {**msgspec.to_builtins(context), "held": context.cached_tokens}  # held: its name in version 0.1.0
