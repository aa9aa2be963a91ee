"""``GET /v1/models``: the one model that is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.openai import Model, ModelList
from ctxreuse_edge.api.answers import json_answer, known_model

if TYPE_CHECKING:
    from ctxreuse_edge.node import Node

__all__ = ["routes"]


def routes(node: Node) -> list[Route]:
    """The routes of this module."""

    def model() -> Model:
        return Model(node.model.id, int(node.since), node.runtime.engine.space.max_tokens)

    async def every(_: Request) -> Response:
        return json_answer(ModelList([model()]))

    async def one(request: Request) -> Response:
        known_model(node, request.path_params["name"])
        return json_answer(model())

    return [Route("/v1/models", every), Route("/v1/models/{name:path}", one)]
