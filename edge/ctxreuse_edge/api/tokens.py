"""``/api/tokens``: token ids in, pieces of text and ids out: what the agent memory library attaches to.

::

    POST /api/tokens/complete {"tokens", "sampling"?, "branches"?, "lossy"?}
                                                                     events {"text", "token", "finish"?}, then {"usage"}
    POST /api/tokens/warm     {"tokens", "branches"?, "lossy"?}      {"usage"}
    POST /api/tokens/forget   {"tokens"}                             {"blocks"}
    GET  /api/tokens/model                                           {"space", "digest", "model", "folder"}

``usage`` is the runtime's own (`ctxreuse.runtime.Usage`). Texts and sessions stay with the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.openai import parse
from ctxreuse.engines.sampling import Sampling
from ctxreuse.keys import as_tokens
from ctxreuse_edge.api.answers import Answer, body_of, json_answer, lossy_of

if TYPE_CHECKING:
    from ctxreuse.engines.generate import Piece
    from ctxreuse.runtime import Completion
    from ctxreuse_edge.node import Node

__all__ = ["TokensRequest", "routes"]

_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class TokensRequest(msgspec.Struct, frozen=True):
    """A prompt in ids, and where in it other contexts may go on differently (``branches``). ``lossy``: see
    `ctxreuse.daemon.openai.Extra`."""

    tokens: Annotated[list[_Id], msgspec.Meta(min_length=1)]
    sampling: Sampling = Sampling()
    branches: list[int] = []
    lossy: str | None = None


def routes(node: Node) -> list[Route]:
    """The routes of this module."""

    async def complete(request: Request) -> Response:
        asked = parse(await body_of(request, node), TokensRequest)
        ids, lossy = as_tokens(asked.tokens), lossy_of(node, asked.lossy)
        running = node.worker.begin(
            lambda: node.runtime.complete(ids, asked.sampling, branches=asked.branches, lossy=lossy)
        )
        return _Pieces(node, running, stream=True)

    async def warm(request: Request) -> Response:
        asked = parse(await body_of(request, node), TokensRequest)
        ids, lossy = as_tokens(asked.tokens), lossy_of(node, asked.lossy)
        usage = await node.worker.call(lambda: node.runtime.warm(ids, branches=asked.branches, lossy=lossy))
        return json_answer({"usage": usage})

    async def forget(request: Request) -> Response:
        asked = parse(await body_of(request, node), TokensRequest)
        blocks = await node.worker.call(lambda: node.runtime.forget(as_tokens(asked.tokens)))
        return json_answer({"blocks": blocks})

    async def model(_: Request) -> Response:
        space = node.runtime.engine.space
        name, folder = node.model
        return json_answer({"space": space, "digest": space.digest.hex(), "model": name, "folder": folder})

    return [
        Route("/api/tokens/complete", complete, methods=["POST"]),
        Route("/api/tokens/warm", warm, methods=["POST"]),
        Route("/api/tokens/forget", forget, methods=["POST"]),
        Route("/api/tokens/model", model),
    ]


class _Pieces(Answer):
    def first(self, completion: Completion) -> Sequence[Any]:
        return [{"usage": completion.usage}]

    def piece(self, completion: Completion, piece: Piece) -> Sequence[Any]:
        return [piece]

    def last(self, completion: Completion) -> Sequence[Any]:
        return [{"usage": completion.usage, "finish": completion.finish}]

    def whole(self, completion: Completion) -> Any:
        return {"usage": completion.usage}
