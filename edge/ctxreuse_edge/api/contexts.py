"""``/api/contexts``: contexts with a name, computed ahead and kept as long as they are wanted.

::

    POST   /api/contexts               {"name"?, "messages" | "text", "pin"?}   201 {"context", "usage"}
    GET    /api/contexts?limit=50                                               {"contexts": […], "total"}
    GET    /api/contexts/NAME                                                   {"context"}
    DELETE /api/contexts/NAME                                                   {"blocks"}
    POST   /api/contexts/NAME/pin, /api/contexts/NAME/unpin                     {"context"}

A chat request goes on from one by ``"context": NAME``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.openai import ApiError, ChatMessage, parse, usage_of
from ctxreuse.errors import SessionError
from ctxreuse_edge.api.answers import body_of, json_answer

if TYPE_CHECKING:
    from ctxreuse_edge.node import Node

__all__ = ["NewContext", "routes"]

_MOST = 1000


class NewContext(msgspec.Struct, frozen=True):
    """What to keep: ``messages`` or a plain ``text``."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    messages: list[ChatMessage] = []
    text: str | None = None
    pin: bool = False


def routes(node: Node) -> list[Route]:
    """The routes of this module."""

    async def create(request: Request) -> Response:
        asked = parse(await body_of(request, node), NewContext)
        if bool(asked.messages) == bool(asked.text):
            raise ApiError(400, "give messages, or a text that is not empty", param="messages")
        messages = [m.message(f"messages[{i}].content") for i, m in enumerate(asked.messages)]
        try:
            made, usage = await node.worker.call(
                lambda: node.contexts.create(asked.name, messages, asked.text, pin=asked.pin)
            )
        except SessionError as error:  # a name that is taken, or that none may have
            raise ApiError(409, str(error), code="context_name", param="name") from None
        return json_answer({"context": made, "usage": usage_of(usage)}, 201)

    async def every(request: Request) -> Response:
        limit = request.query_params.get("limit", "50")
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= _MOST:
            raise ApiError(400, f"limit: a number from 1 to {_MOST}", param="limit")
        found = await node.worker.call(lambda: node.contexts.every(int(limit)))
        return json_answer({"contexts": found, "total": node.contexts.count()})

    async def one(request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "DELETE":
            return json_answer({"blocks": await node.worker.call(lambda: node.contexts.delete(name))})
        return json_answer({"context": await node.worker.call(lambda: node.contexts.get(name))})

    async def pin(request: Request) -> Response:
        name, verb = request.path_params["name"], request.path_params["verb"]
        if verb not in ("pin", "unpin"):
            raise ApiError(404, f"a context has no {verb!r}", code="no_such_route")
        work = node.contexts.pin if verb == "pin" else node.contexts.unpin
        return json_answer({"context": await node.worker.call(lambda: work(name))})

    return [
        Route("/api/contexts", create, methods=["POST"]),
        Route("/api/contexts", every, methods=["GET"]),
        Route("/api/contexts/{name}", one, methods=["GET", "DELETE"]),
        Route("/api/contexts/{name}/{verb}", pin, methods=["POST"]),
    ]
