"""``GET /api/why/{request}``: why a request reused what it did and no more.

::

    GET /api/why/ID             ID as in the header x-request-id or in the answer's "id"
    GET /api/why?session=NAME   the last request, of a session if one is named

The answer is `ctxreuse.why.Why`, with its sentences in "text" and "advice".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.openai import ApiError
from ctxreuse.errors import SessionError
from ctxreuse_edge.api.answers import json_answer

if TYPE_CHECKING:
    from ctxreuse_edge.node import Node

__all__ = ["routes"]


def routes(node: Node) -> list[Route]:
    """The routes of this module."""

    async def why(request: Request) -> Response:
        name, session = request.path_params.get("name", ""), request.query_params.get("session", "")
        # Without keys only programs of the user of this device come here; with keys others may.
        edge = node.settings.edge
        others = not edge.api_key_file
        try:
            found = await node.worker.call(lambda: node.runtime.why(name, session=session, others=others))
        except SessionError as error:
            raise ApiError(404, str(error), type="not_found_error", code="no_such_request") from None
        return json_answer(found)

    return [Route("/api/why", why), Route("/api/why/{name:path}", why)]
